"""The command line: `multigrad doctor` and `multigrad explain`.

Each command has a module here, and `main` parses the arguments. They import neither Keras nor a framework.
"""
