"""The process of one backend: `python -m multigrad.cli.demo FILE` writes what it measured to FILE as JSON."""

import json
import sys
from pathlib import Path

import keras

from multigrad.cli.demo.experiments import chain_of_squares, digits, log1pexp_at_100

# The expected numbers are those of float32, whatever the user's own keras.json says.
keras.config.set_floatx("float32")
measurements = log1pexp_at_100() | chain_of_squares() | digits()
Path(sys.argv[1]).write_text(json.dumps(measurements))
