"""Run the experiments on the active backend: `python -m multigrad.cli.demo RESULT` writes a JSON file."""

import json
import sys
from pathlib import Path

import keras

from multigrad.cli.demo.experiments import chain_of_squares, digits, log1pexp_at_100

# The expected results are those of float32, so a different floatx in the user's keras.json is ignored.
keras.config.set_floatx("float32")
measurements = log1pexp_at_100() | chain_of_squares() | digits()
Path(sys.argv[1]).write_text(json.dumps(measurements))
