"""The command line: `multigrad doctor`, `multigrad explain` and `multigrad demo`.

Each command has a module or a package here, and `main` parses the arguments. These modules import neither
Keras nor a framework, except for the experiments of the demo, which run in processes of their own.
"""
