"""Only the framework of the active backend is imported, and only when it is used."""

import importlib
import subprocess
import sys

import pytest
from support import BACKEND

pytestmark = [pytest.mark.forward, pytest.mark.package]

FRAMEWORKS = {"tensorflow", "jax", "torch", "openvino"}

LOADED = f"import sys; print(*sorted({FRAMEWORKS | {'keras'}!r} & set(sys.modules)))"


def loaded(code):
    """Return the frameworks that a new process has imported after running `code`."""
    command = [sys.executable, "-c", f"{code}\n{LOADED}"]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def test_importing_multigrad_imports_nothing():
    assert loaded("import multigrad; multigrad.__version__, multigrad.__all__") == set()


def test_using_multigrad_imports_only_the_active_framework():
    used = loaded("import multigrad; multigrad.op_custom_gradient(lambda x: (x, lambda u: u))(1.0)")
    assert used == loaded("import keras")  # Keras may import more: its NumPy backend imports JAX


def test_importing_multigrad_after_keras_registers_what_models_contain(tmp_path):
    save = """
import keras, multigrad.layers
inputs = keras.Input((3,))
outputs = multigrad.ops.scale_gradient(keras.layers.Dense(3, activation=multigrad.ops.log1pexp)(inputs), 2.0)
keras.Model(inputs, multigrad.layers.GradientReversal()(outputs)).save("model.keras")
"""
    load = "import keras\nimport multigrad\nkeras.models.load_model('model.keras')"
    for code in save, load:
        subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.skipif(BACKEND != "jax", reason="only JAX has settings that its runtime reads when it starts")
def test_an_import_does_not_start_the_runtime_of_jax():
    code = (
        "import keras, multigrad, jax; jax.config.update('jax_num_cpu_devices', 2); print(jax.device_count())"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["2"]


def test_the_check_finds_other_frameworks():
    assert loaded("import sys; sys.modules['torch'] = sys.modules['jax'] = sys") == {"jax", "torch"}


@pytest.mark.parametrize(
    ("module", "name", "meant"),
    [
        ("multigrad", "nothing", None),
        ("multigrad", "gard", "grad"),
        ("multigrad", "op_custom_gradiant", "op_custom_gradient"),
        ("multigrad.ops", "safe_nrom", "safe_norm"),
        ("multigrad.ops", "relo", "relu"),
    ],
)
def test_the_error_for_an_unknown_name_has_the_nearest_public_name(module, name, meant):
    said = f"attribute '{name}'" + (f". Did you mean '{meant}'\\?$" if meant else "$")
    with pytest.raises(AttributeError, match=said):
        getattr(importlib.import_module(module), name)
    assert not hasattr(importlib.import_module(module), name)
