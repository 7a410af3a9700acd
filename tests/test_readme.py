"""The README's Python blocks run, one after the other, and print what they say."""

import re
from pathlib import Path

from support import numpy

README = Path(__file__).parent.parent / "README.md"


def test_the_python_blocks_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one of them saves a model
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 11
    shown = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), shown)
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0] == "1.0"
    (table,) = re.findall(r"^```\n(call .*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert table in printed
    place = lines.index("6")
    assert lines[place + 1] == "wrong: the gradient differs from the central differences"
    assert lines[place + 2].startswith("  argument: 'x'[")
    slope_of_x, parameters = shown["gradients"]
    assert float(slope_of_x) == 3.0
    assert {name: float(g) for name, g in parameters.items()} == {"slope": 2.0, "offset": 1.0}
    assert [float(numpy(g)) for g in (shown["of_x"], *shown["of_variables"])] == [3.0, 2.0]
    assert float(numpy(shown["loss"])) < 1e-3  # it trains
    # The rules of the two ops that the README only defines:
    low_and_high = shown["grad"](lambda x: 5.0 * shown["split"](x)[0] + 7.0 * shown["split"](x)[1])
    assert float(low_and_high(3.0)) == 12.0  # not 7, as plain autodiff has it
    clipped = shown["grad"](lambda x: shown["clip"](x, (0.0, 1.0), scale=3.0))
    assert float(clipped(7.0)) == 3.0
    assert [float(g) for g in shown["grad"](shown["scale"], argnums=(0, 1))(3.0, 4.0)] == [4.0, 3.0]


def test_both_commands_stand_on_one_line_each():
    common = "python3 -m venv .venv && .venv/bin/pip install -q nox && .venv/bin/nox"
    lines = README.read_text().splitlines()
    assert lines.count(common) == 1
    assert lines.count(f"{common} -s demo") == 1
