"""The table of families says what code, tests and measurements say."""

from __future__ import annotations

import pytest

from scripts import families_table
from scripts.families_table import DOCUMENT, Measurement


def test_the_committed_table_is_what_the_script_writes() -> None:
    assert DOCUMENT.read_text() == families_table.document(), (
        "docs/families.md is stale: python scripts/families_table.py"
    )


def test_tests_that_there_are_not_are_not_named() -> None:
    with pytest.raises(ValueError, match="tests that there are not"):
        families_table.check_tests(["unit/test_tree.py::test_that_nobody_wrote"])


@pytest.mark.parametrize(
    ("file", "contains"),
    [("h200_experts.json", "step of a model that nobody measured"), ("cpu_float32.json", "")],
)
def test_what_was_not_measured_on_a_gpu_is_not_said_to_be(file: str, contains: str) -> None:
    with pytest.raises(ValueError, match=file):
        families_table.measured(Measurement(file=file, contains=contains))


def test_what_was_not_seen_on_a_gpu_is_not_said_to_be_exact_there() -> None:
    assert "gemma3" in families_table.exact_on_gpu(families_table.EXACT_ON_GPU)
    for file in ("cpu_float32.json", "h200_kernels.json"):
        with pytest.raises(ValueError, match=file):
            families_table.exact_on_gpu(file)


def test_a_new_architecture_needs_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(families_table.MODELS, "LlamaForCausalLM")
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        families_table.document()


def test_a_new_architecture_needs_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families_table, "evidence", lambda: ({"LlamaForCausalLM": ["x"]}, {}))
    with pytest.raises(ValueError, match=r"compared with transformers: .*InternLM3ForCausalLM"):
        families_table.document()
