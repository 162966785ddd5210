"""How kernels come in: targets, signatures, and the sentence for each thing that can be wrong."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attncheck.kernels import loading
from attncheck.kernels.candidate import Candidate
from attncheck.kernels.loading import BUILT_IN, LoadError, from_callable, load
from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.profile import Conventions
from attncheck.oracle.result import Result

#: what neither sdpa nor numpy has an argument for
NEVER_PASSED = {"softcap", "dlse", "sinks", "dropout"}

KERNEL = """
from attncheck.kernels.candidate import Candidate
from attncheck.oracle.result import Result

LIMIT = 3

def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return query

def plain(q, k, v):
    return q

def packed(q, k, v, cu_seqlens):
    return q

def pair(q, k):
    return q

def of_case(case):
    return Result(o=case.v)

class Kernel:
    def __call__(self, q, k, v, **keywords):
        return q

kernel = Kernel()
_hidden = plain
ready = Candidate(name="ready", run=lambda case, presentation, want: of_case(case), lacks={"mask": "no mask"})
"""


@pytest.fixture
def kernel(tmp_path: Path) -> str:
    path = tmp_path / "my_kernel.py"
    path.write_text(KERNEL)
    return str(path)


def tiny() -> Case:
    one = np.ones((1, 1, 1, 1))
    return Case(q=one, k=one, v=2 * one)


def sentence(target: str, **options: object) -> str:
    """The error of a load that must fail: one sentence, no line break."""
    with pytest.raises(LoadError) as caught:
        load(target, **options)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text and not text.endswith(".")
    return text


# -- what loads ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_loads_under_its_own_name(name: str) -> None:
    assert load(name).name == name


def test_importing_the_loader_imports_no_torch() -> None:
    code = "import sys, attncheck.kernels.loading as l; l.load('numpy-blocked'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_file_loads_and_is_named_as_it_was_written(kernel: str) -> None:
    candidate = load(f"{kernel}:attention", like="sdpa")
    assert candidate.name == f"{kernel}:attention"
    assert candidate.convention == "sdpa"


def test_a_candidate_keeps_its_name_and_needs_no_convention(kernel: str) -> None:
    candidate = load(f"{kernel}:ready")
    assert candidate.name == "ready"
    assert candidate.run(tiny(), Presentation(), frozenset({"o"})).o is not None
    assert load(f"{kernel}:ready", name="other").name == "other"


def test_a_module_attribute_loads() -> None:
    assert load("torch.nn.functional:scaled_dot_product_attention", like="sdpa").lacks.keys() == NEVER_PASSED


def test_a_module_of_the_current_folder_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernel_of_this_folder.py").write_text("def f(case): ...")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    assert load("kernel_of_this_folder:f", like="case").convention == "case"


def test_an_entry_point_loads(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    monkeypatch.syspath_prepend(str(Path(kernel).parent))
    point = importlib.metadata.EntryPoint("announced", "my_kernel:ready", loading.ENTRY_POINTS)
    monkeypatch.setattr(loading.importlib.metadata, "entry_points", lambda group: [point])
    assert load("announced").name == "ready"
    assert "announced" in sentence("other")


def test_siblings_import_during_load_and_during_calls(tmp_path: Path) -> None:
    for name, number in (("one", 1), ("two", 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "common_sibling.py").write_text(f"NUMBER = {number}")
        (folder / "late_sibling.py").write_text(f"LATE = {number}")
        (folder / "kernel.py").write_text(
            "from common_sibling import NUMBER\n"
            "from attncheck.oracle.result import Result\n"
            "def f(case):\n"
            "    from late_sibling import LATE\n"
            "    from common_sibling import NUMBER as again\n"
            "    return Result(o=case.v * 100 * NUMBER + 10 * again + LATE)\n"
        )
    before = list(sys.path)
    candidates = [load(f"{tmp_path / name / 'kernel.py'}:f", like="case") for name in ("one", "two")]
    for number, candidate in [*zip((1, 2), candidates, strict=True)] * 2:
        result = candidate.run(tiny(), Presentation(), frozenset({"o"}))
        assert result.o is not None and result.o.item() == 200 * number + 10 * number + number
    assert sys.path == before


def test_the_same_stem_in_two_folders_gives_two_modules(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.py").write_text(f"def {name}(case): ...")
        assert load(f"{tmp_path / name / 'kernel.py'}:{name}", like="case")
    assert "kernel" not in sys.modules


def test_declarations_go_over_a_candidates_own(kernel: str) -> None:
    candidate = load(f"{kernel}:ready", supports=["mask"], lacks=["bias"], forward_only=True, dtypes=["float32"])
    assert candidate.lacks == {"bias": "declared with --lacks"}
    assert candidate.offers == {"o", "lse"}
    assert candidate.dtypes == ("float32",)
    conventions = Conventions(empty_row="nan")
    assert load(f"{kernel}:ready", conventions=conventions).conventions == conventions


def test_forward_only_offers_no_gradient(kernel: str) -> None:
    assert load(f"{kernel}:attention", like="sdpa", forward_only=True).offers == {"o"}
    assert load(f"{kernel}:of_case", like="case", forward_only=True).offers == {"o", "lse"}


def test_from_callable_takes_functions_and_instances() -> None:
    def attention(q: object, k: object, v: object, **keywords: object) -> object:
        return q

    class Kernel:
        def __call__(self, q: object, k: object, v: object, **keywords: object) -> object:
            return q

    assert from_callable(attention, "numpy").name == "attention"
    assert from_callable(Kernel(), "numpy").name == "Kernel"
    assert isinstance(from_callable(Kernel(), "sdpa", name="mine"), Candidate)


# -- what a signature shows ------------------------------------------------------------------


def test_a_bare_sdpa_signature_lacks_what_it_cannot_be_asked(kernel: str) -> None:
    lacks = load(f"{kernel}:plain", like="sdpa").lacks
    assert lacks["scale"] == "its signature has no scale"
    assert lacks["window"] == "its signature has no attn_mask"
    assert lacks["causal-square"] == "its signature has neither is_causal nor attn_mask"
    assert lacks["gqa"] == "its signature has no enable_gqa"
    assert not lacks.keys() & {"backward", "dv!=d", "zero-size", "empty-row"}


def test_keyword_arguments_accept_everything(kernel: str) -> None:
    assert load(f"{kernel}:kernel", like="sdpa").lacks.keys() == NEVER_PASSED
    assert load(f"{kernel}:kernel", like="numpy").lacks.keys() == NEVER_PASSED


def test_flash_attn_and_numpy_signatures(kernel: str) -> None:
    lacks = load(f"{kernel}:plain", like="flash_attn").lacks
    assert lacks["softcap"] == "its signature has no softcap"
    assert lacks["dlse"] == "its signature has no return_attn_probs"
    assert lacks["mask"] == "flash_attn_func has no mask"
    lacks = load(f"{kernel}:plain", like="numpy").lacks
    assert lacks["alibi"] == "its signature has no bias"
    assert lacks["causal-top-left"] == "its signature has no mask"


def test_supports_and_lacks_overrule_the_signature(kernel: str) -> None:
    candidate = load(f"{kernel}:plain", like="sdpa", supports=["gqa"], lacks=["dv!=d"])
    assert "gqa" not in candidate.lacks
    assert candidate.lacks["dv!=d"] == "declared with --lacks"


# -- what does not ---------------------------------------------------------------------------


def test_an_unknown_target_lists_what_is_known() -> None:
    text = sentence("torch-spda-math")
    assert text.startswith("unknown target 'torch-spda-math'; built in are numpy-blocked, torch-sdpa-math, ")
    assert "entry points in attncheck.candidates: " in text


def test_a_target_without_attribute(kernel: str) -> None:
    assert sentence(kernel) == f"target {kernel!r} names no attribute; write it as path/to/file.py:attribute"
    assert "names no attribute" in sentence(f"{kernel}:")


def test_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "absent.py"
    assert sentence(f"{path}:f") == f"{path} does not exist or is not a file"


def test_a_missing_attribute_lists_the_callables_there(kernel: str) -> None:
    assert sentence(f"{kernel}:atention", like="sdpa") == (
        f"{kernel} has no attribute 'atention'; "
        "callables there: Kernel, attention, kernel, of_case, packed, pair, plain, ready"
    )


def test_an_attribute_that_is_not_callable(kernel: str) -> None:
    assert sentence(f"{kernel}:LIMIT", like="sdpa").startswith(
        f"{kernel}:LIMIT is of type int; it must be a Candidate or a callable; callables there: "
    )


def test_a_class_is_not_a_kernel(kernel: str) -> None:
    assert sentence(f"{kernel}:Kernel", like="sdpa").endswith("is a class; name an instance or a function")


@pytest.mark.parametrize(
    ("source", "says", "line"),
    [
        ("import numpy\nimport no_such_module_anywhere\n", "ModuleNotFoundError: No module named", 2),
        ("x = 1\n\ny = 1 / 0\n", "ZeroDivisionError: division by zero", 3),
        ("def f(:\n", "SyntaxError: ", 1),
        ("import sys\nsys.exit(7)\n", "SystemExit: 7", 2),
        ("def g():\n    raise OSError('no\\nGPU')\ng()\n", "OSError: no GPU", 3),
    ],
)
def test_an_import_that_fails_names_exception_and_line(tmp_path: Path, source: str, says: str, line: int) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    text = sentence(f"{path}:f", like="sdpa")
    assert text.startswith(f"{path} could not be imported: {says}")
    if "def g" not in source:
        assert text.endswith(f"({path}, line {line})")
    assert not any(name.startswith("attncheck_target_broken") for name in sys.modules)


def test_a_module_that_does_not_exist() -> None:
    assert sentence("no_such_package.kernel:f") == (
        "no_such_package.kernel could not be imported: ModuleNotFoundError: No module named 'no_such_package'"
    )


def test_a_plain_callable_needs_a_convention(kernel: str) -> None:
    assert sentence(f"{kernel}:attention") == (
        f"{kernel}:attention is a plain callable; say with --like which convention it follows: "
        "sdpa, flash_attn, flash_attn_varlen, flash_attn_with_kvcache, numpy, case"
    )


def test_an_unknown_convention_lists_the_known(kernel: str) -> None:
    assert sentence("numpy-blocked", like="spda").startswith("--like is 'spda'")  # though it has no use for one
    text = sentence(f"{kernel}:attention", like="spda")
    known = "sdpa, flash_attn, flash_attn_varlen, flash_attn_with_kvcache, numpy, case"
    assert text == f"--like is 'spda'; known conventions are {known}"


def test_a_signature_that_does_not_fit_names_kernel_parameter_and_accepted(kernel: str) -> None:
    passes = "sdpa passes query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa"
    assert sentence(f"{kernel}:packed", like="sdpa") == (
        f"{kernel}:packed does not follow sdpa: its parameter 'cu_seqlens' has no default "
        f"and is not one that sdpa passes by name; {passes}"
    )
    assert sentence(f"{kernel}:pair", like="sdpa") == (
        f"{kernel}:pair does not follow sdpa: it takes 2 by position (q, k) where 3 are needed; {passes}"
    )
    assert "it can be called neither with (case) nor with (case, presentation, want)" in sentence(
        f"{kernel}:pair", like="case"
    )


def test_unknown_features_and_dtypes_list_the_accepted(kernel: str) -> None:
    assert sentence(f"{kernel}:attention", like="sdpa", lacks=["gqaa"]).startswith(
        "--lacks names 'gqaa'; accepted are backward, dlse, "
    )
    assert sentence(f"{kernel}:ready", supports=["x"]).startswith("--supports names 'x'; accepted are ")
    assert sentence(f"{kernel}:ready", dtypes=["fp8"]) == (
        "dtype is 'fp8'; accepted are float64, float32, float16, bfloat16"
    )


def test_supporting_what_there_is_no_way_to_ask(kernel: str) -> None:
    assert sentence(f"{kernel}:attention", like="sdpa", supports=["softcap"]) == (
        f"{kernel}:attention cannot support softcap with --like sdpa: scaled_dot_product_attention has no softcap"
    )
    assert sentence(f"{kernel}:plain", like="sdpa", supports=["mask"]).endswith("its signature has no attn_mask")


def test_a_device_for_a_candidate(kernel: str) -> None:
    text = sentence(f"{kernel}:ready", device="cuda")
    assert text == f"{kernel}:ready is a Candidate that runs on cpu; --device cuda is for callables"


def test_not_callable_in_python() -> None:
    with pytest.raises(LoadError, match="int is of type int; it must be a Candidate or a callable"):
        from_callable(3, "sdpa")  # type: ignore[arg-type]
    assert isinstance(from_callable(lambda case: Result(), "case"), Candidate)
