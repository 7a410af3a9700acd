"""`multigrad demo`: run the same custom gradients on each installed backend, side by side.

`command` starts a process for each backend (`__main__`), which runs the `experiments` and writes its
measurements to a file; `report` compares the measurements with the expected values and prints a table.
"""
