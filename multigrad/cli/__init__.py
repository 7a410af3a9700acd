"""The command line: `multigrad doctor` and `multigrad demo`.

Each command has a module or a package here, and `main` parses the arguments. Modules in this package import
neither Keras nor a framework; the exception is the demo's experiments, which run in processes of their own.
"""
