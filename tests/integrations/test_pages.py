"""The Python examples of the pages on evaluation, monitoring and slim outputs run as they stand."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("evaluation.md", "monitoring.md", "slim_outputs.md")
EXAMPLES = [
    pytest.param(example, id=f"{page}, {number}")
    for page in PAGES
    for number, example in enumerate(
        re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    )
    if "from_pretrained" not in example  # downloads weights
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example: str, tmp_path: Path) -> None:
    """In a process of its own and an empty folder, as somebody who tries it out."""
    if "transformers" in example and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_there_are_examples_of_each_page() -> None:
    assert {str(parameter.id).split(",")[0] for parameter in EXAMPLES} == set(PAGES)
