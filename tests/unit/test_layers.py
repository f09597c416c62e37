"""The shape of the source: what imports without torch, how large things are, what is explained."""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from fnmatch import fnmatch

import pytest
from support import REPO, environment

SOURCE = REPO / "src" / "eke"
FILES = sorted(SOURCE.rglob("*.py"))
HEAVY = ("torch", "transformers", "accelerate", "wandb", "deepspeed", "bitsandbytes", "peft")

LIGHT = (
    "cli", "common.process_env", "config.compose", "config.schema", "data.sources",
    "estimate.memory", "estimate.time", "hardware", "launch", "models.checkpoints",
    "models.sizes", "plan.identity", "plan.planner", "plan.record", "results.report",
    "results.trackers", "rules", "tuning.recipes", "tuning.search", "workflows",
)  # fmt: skip
"""They answer on a laptop and on a login node, in well under a second."""


def name_of(path) -> str:
    return str(path.relative_to(SOURCE))


@functools.cache
def parsed(path) -> ast.Module:
    return ast.parse(path.read_text())


def lines_of(code: str, tmp_path, *arguments: str) -> list[str]:
    """What a fresh process prints that runs some code."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def modules_after(code: str, tmp_path) -> set[str]:
    """Top-level modules that a fresh process has imported after some code, and eke's packages."""
    names = lines_of(f"{code}\nimport sys\nprint(*sys.modules)", tmp_path)[-1].split()
    own = {".".join(name.split(".")[:2]) for name in names if name.startswith("eke.")}
    return own | {name.partition(".")[0] for name in names}


EACH = """
import importlib, sys
for name in sys.argv[1:]:
    for module in [m for m in sys.modules if m.partition(".")[0] == "eke"]:
        del sys.modules[module]
    before = {*sys.modules}
    importlib.import_module(f"eke.{name}")
    print(name, *{m.partition(".")[0] for m in {*sys.modules} - before})
"""
"""Each module is the first of eke's to be imported, as in a fresh process."""


def new_imports(modules, tmp_path) -> dict[str, set[str]]:
    """Of each of eke's modules, the top-level modules that are imported with it."""
    lines = lines_of(EACH, tmp_path, *modules)
    found = {name: set(new) for name, *new in map(str.split, lines)}
    assert sorted(found) == sorted(modules)
    return found


def test_imports_without_torch(tmp_path) -> None:
    found = new_imports(LIGHT, tmp_path)
    assert {name: new & set(HEAVY) for name, new in found.items() if new & set(HEAVY)} == {}


def test_contributing_lists_checked_layers() -> None:
    block = (REPO / "CONTRIBUTING.md").read_text().split("## Layers")[1].split("\n\n")[2]
    told = [set(layer.split(" | ")) for layer in " ".join(block.split()).split(" > ")]
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    contract = project["tool"]["importlinter"]["contracts"][0]
    checked = [set(layer.replace("eke.", "").split(" | ")) for layer in contract["layers"]]
    assert told[:-1] == checked[:-1]
    assert told[-1] - {"..."} <= checked[-1]


COMPOSING = ("hydra", "omegaconf", "antlr4")
"""Only what composes needs them; importing them takes as long as all of eke."""


@pytest.mark.slow
def test_modules_with_a_plan_do_not_import_hydra(tmp_path) -> None:
    modules = (
        "training.loop.worker", "training.loop.agent", "data.preparation.rows", "results.report"
    )  # fmt: skip
    found = new_imports(modules, tmp_path)
    assert not set().union(*found.values()) & set(COMPOSING)


IN_TURN = """
import sys
from eke.workflows import main
for words, expected in eval(sys.argv[1]):
    assert main(words) == expected
    print("imported", *sys.modules)
"""
SWEEP = ["-m", "seed=0,1", "plan_only=true", "hardware=cpu", "data=synthetic"]
COMMANDS = [(["plan_only=true", "hardware=h100"], 0), (["precison=bf16"], 2), (SWEEP, 0)]


@pytest.mark.slow
def test_planning_does_not_import_torch(tmp_path) -> None:
    """One process: what an earlier command has imported counts for the later ones, too."""
    lines = lines_of(IN_TURN, tmp_path, repr(COMMANDS))
    a_plan, a_mistake, a_sweep = (set(n.split()) for n in lines if n.startswith("imported "))
    assert not a_plan & {*HEAVY, "numpy", "eke.launch", "eke.training"}
    assert not a_mistake & {*HEAVY}
    assert not a_sweep & {*HEAVY, "eke.training", "eke.launch.slurm", "eke.launch.command"}
    assert not list(tmp_path.iterdir()), "planning leaves nothing behind"


NAMING_SLURM = {
    "common/plugins.py", "config/compose/catalogue.py", "config/schema/config.py",
    "hardware/fingerprint.py", "rules/distributed.py",
}  # fmt: skip


def test_few_files_name_one_launcher() -> None:
    """All others ask the launcher that was chosen."""
    found = {name_of(path) for path in FILES if "slurm" in path.read_text()}
    assert {name for name in found if "slurm" not in name} == NAMING_SLURM


def test_few_modules_ask_for_options() -> None:
    """Others read facts: `plan.ranks`, `plan.targets`, properties of the configuration's groups."""
    deciding = ("config", "rules", "plan")
    files = [path for path in FILES if path.relative_to(SOURCE).parts[0] not in deciding]
    texts = [path.read_text() for path in files]
    compared = sum(len(re.findall(r"\.option (?:==|!=|in|not in)", text)) for text in texts)
    of_task, of_ranks = (
        sum(bool(re.search(rf"config\.{group}\b", text)) for text in texts)
        for group in ("task", "distributed")
    )
    assert len(texts) > 100
    assert compared <= 22
    assert of_task <= 5
    assert of_ranks <= 7


def test_help_imports_only_the_configuration(tmp_path) -> None:
    code = "from eke.cli import main\nassert main(['train', '--help']) == 0"
    later = {"eke.workflows", "eke.plan.planner", "eke.estimate", "eke.rules", "eke.launch"}
    assert not modules_after(code, tmp_path) & {*HEAVY, *later}


# --- budgets ------------------------------------------------------------------------------------


def long_functions(path) -> list[str]:
    return [
        f"{name_of(path)}.{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > 60
    ]


@pytest.mark.slow
def test_files_and_functions_stay_small() -> None:
    files = [*FILES, *(REPO / "tools").glob("*.py")]
    assert [p.name for p in files if len(p.read_text().splitlines()) > 600] == []
    assert [each for path in FILES for each in long_functions(path)] == []


PACKAGES = (
    "common", "config", "hardware", "data", "models", "plan", "rules", "estimate", "tuning",
    "results", "training", "launch", "workflows", "cli",
)  # fmt: skip
"""From bottom to top; import-linter checks their order."""


def test_top_level_packages_are_fixed() -> None:
    assert sorted(path.parent.name for path in SOURCE.glob("*/__init__.py")) == sorted(PACKAGES)
    assert sorted(path.name for path in SOURCE.glob("*.py")) == [
        "__init__.py",
        "__main__.py",
        "extend.py",
    ]
    assert len(FILES) <= 312


def test_caches_depend_on_packages_that_exist() -> None:
    from eke.estimate.memory import trace_client
    from eke.estimate.time import time_history

    sources = {*trace_client.SOURCES, *time_history.SOURCES}
    assert [name for name in sources if not (SOURCE / name / "__init__.py").is_file()] == []


def test_tests_mirror_packages() -> None:
    unit = REPO / "tests" / "unit"
    found = (path.relative_to(unit).parts for path in unit.rglob("test_*.py"))
    folders = {parts[0] for parts in found if len(parts) > 1}
    assert folders == set(PACKAGES)


# --- documentation ------------------------------------------------------------------------------


def undocumented(body, where: str = ""):
    """Public functions and classes of a module, and methods of a class, without a docstring."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                yield f"{where}{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from undocumented(node.body, f"{where}{node.name}.")


def said(node) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@pytest.mark.slow
def test_every_public_function_and_class_is_documented() -> None:
    modules = {name_of(path): parsed(path) for path in FILES}
    assert [name for name, module in modules.items() if not ast.get_docstring(module)] == []
    assert [
        f"{n}.{each}" for n, module in modules.items() for each in undocumented(module.body)
    ] == []


def schema_fields():
    return [path for path in FILES if path.parent.name == "schema"]


@pytest.mark.parametrize("path", schema_fields(), ids=name_of)
def test_every_key_is_explained(path) -> None:
    """The string below a field is its help text; `Config`'s groups have their classes'."""
    missing = []
    for cls in (node for node in parsed(path).body if isinstance(node, ast.ClassDef)):
        pairs = zip(cls.body, [*cls.body[1:], None], strict=True)
        missing += [
            f"{cls.name}.{ast.unparse(node.target)}"
            for node, follows in pairs
            if isinstance(node, ast.AnnAssign) and not said(follows)
            if "default_factory" not in ast.unparse(node)
            if cls.name != "Limit"
            if cls.name == "OptionGroup" or ast.unparse(node.target) != "option"  # explained there
        ]
    assert not missing


# --- exceptions to the rules ----------------------------------------------------------------------

WAIVER = re.compile(r"#\s*(noqa|type:\s*ignore|pragma:|mypy:)")
REASON = re.compile(r"#\s*(?:noqa(?::[\w\s,]+)?|type:\s*ignore(?:\[[\w, -]+\])?)\s*#\s*\S{2}")


def waivers_without_reason(text: str) -> list[str]:
    """Comments that switch a check off and do not say why."""
    lines = text.splitlines()
    if not any(WAIVER.search(line) and not REASON.search(line) for line in lines):
        return []  # most files: to take a text apart is slow
    comments = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    return [c for c in comments if WAIVER.search(c) and not REASON.search(c)]


OWN_FILES = [*FILES, *sorted((REPO / "tests").rglob("*.py")), REPO / "train.py"]


def test_every_waiver_names_its_reason() -> None:
    silent = {path: waivers_without_reason(path.read_text()) for path in OWN_FILES}
    assert {path: lines for path, lines in silent.items() if lines} == {}


@pytest.mark.parametrize(
    ("comment", "bad"),
    [
        ("x = 1  # noqa: E501", True),
        ("x = 1  # type: ignore[misc]", True),
        ("x = 1  # type: ignore", True),
        ("x = 1  # noqa: E501  # the URL is that long", False),
        ("x = 1  # type: ignore[arg-type, misc]  # torch 2.13 says Any", False),
        ("x = '# noqa'", False),
    ],
    ids=["noqa", "type", "bare", "noqa with reason", "type with reason", "text"],
)
def test_waivers_are_detected(comment, bad) -> None:
    assert bool(waivers_without_reason(comment + "\n")) == bad


def calls_of(tree: ast.AST, *names: str):
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(names)
    ]


def skips_without_reason(path) -> list[str]:
    if not re.search(r"mark\.(skip|xfail)|pytest\.skip", path.read_text()):
        return []  # most files: to take a text apart is slow
    return [
        ast.unparse(call)
        for call in calls_of(parsed(path), "mark.skip", "mark.skipif", "mark.xfail", "pytest.skip")
        if not any(k.arg == "reason" for k in call.keywords)
        and not (ast.unparse(call.func) == "pytest.skip" and call.args)
    ]


def test_every_skip_names_its_reason() -> None:
    silent = {path: skips_without_reason(path) for path in OWN_FILES}
    assert {path: calls for path, calls in silent.items() if calls} == {}


def test_pytest_finds_every_folder_of_tests(request) -> None:
    """Its own list of folders to leave out has names like `build`, without a word about it."""
    left_out = request.config.getini("norecursedirs")
    folders = {part for file in (REPO / "tests").rglob("test_*.py") for part in file.parts}
    assert not [name for name in folders if any(fnmatch(name, pattern) for pattern in left_out)]


@pytest.mark.slow
def test_only_the_command_line_prints() -> None:
    printing = {
        name_of(path)
        for path in FILES
        if "print(" in path.read_text()  # few files: to look at every call is slow
        for call in calls_of(parsed(path), "print")
        if ast.unparse(call.func) == "print"
    }
    assert printing <= {"cli/__init__.py", "cli/__main__.py"}


def problem_without_id(call: ast.Call) -> bool:
    """True if no argument of `Problem(...)` is an identifier in snake case."""
    named = next((k.value for k in call.keywords if k.arg in ("id", None)), None)
    if named is None and (
        len(call.args) >= 5 or any(isinstance(a, ast.Starred) for a in call.args)
    ):
        named = call.args[4] if len(call.args) >= 5 else call.args[-1]
    if isinstance(named, ast.Constant):
        return not re.fullmatch(r"[a-z]+(_[a-z0-9]+)*", str(named.value))
    return named is None or isinstance(named, ast.Starred)


@pytest.mark.parametrize(
    ("source", "lacks"),
    [
        ("Problem(key, value, why, fix)", True),
        ("Problem(key, value, why, id='')", True),
        ("Problem(key, value, why, fix, 'Wrong type')", True),
        ("Problem(key, *explained)", True),
        ("Problem(key, value, why, passing=True)", True),
        ("Problem(key, value, why, fix, 'wrong_type')", False),
        ("Problem(*pair, why, fix, 'wrong_type')", False),
        ("Problem(key, value, why, id=cell.rule)", False),
    ],
)
def test_missing_id_of_a_problem_is_found(source, lacks) -> None:
    (call,) = calls_of(ast.parse(source), "Problem")
    assert problem_without_id(call) is lacks


def test_every_problem_has_an_id() -> None:
    texts = {path: path.read_text() for path in FILES}
    lacking = [
        f"{name_of(path)}:{call.lineno}"
        for path, text in texts.items()
        if "Problem(" in text  # to take a text apart is slow
        for call in calls_of(ast.parse(text), "Problem")
        if problem_without_id(call)
    ]
    assert lacking == []


def test_source_has_no_todo() -> None:
    left = [name_of(p) for p in FILES if re.search(r"\b(TODO|FIXME|XXX)\b", p.read_text())]
    raised = [name_of(p) for p in FILES if re.search(r"raise NotImplementedError", p.read_text())]
    assert not left + raised


AFTER_THE_PLAN = ("estimate", "training", "launch", "results")


def reads_of_precision(tree: ast.AST) -> list[str]:
    """Reads of a configuration's `precision`, or of the option chosen for it."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "precision")
        or (
            isinstance(node, ast.Call | ast.Subscript)
            and re.search(r"choices(\.get\(|\[)['\"]precision['\"]", ast.unparse(node))
        )
    ]


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("plan.config.precision.option", 1),
        ("plan.choices['precision']", 1),
        ("plan.choices.get('precision', '')", 1),
        ("plan.compute.weights", 0),
        ("plan.choices['model']", 0),
    ],
)
def test_reads_of_precision_are_detected(code, number) -> None:
    assert len(reads_of_precision(ast.parse(code))) == number


@pytest.mark.slow
def test_number_formats_are_read_from_the_plan() -> None:
    later = [path for path in FILES if path.relative_to(SOURCE).parts[0] in AFTER_THE_PLAN]
    later = [path for path in later if re.search("precision|decide_formats", path.read_text())]
    assert later
    found = {name_of(path): reads_of_precision(parsed(path)) for path in later}
    assert {name: reads for name, reads in found.items() if reads} == {}
    assert [name_of(path) for path in later if "decide_formats" in path.read_text()] == []


def test_text_names_no_module_of_a_higher_package() -> None:
    """Imports are checked by import-linter. Names of modules in texts are in common/plugins.py."""
    rules = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]
    order = [name.partition(".")[2] for name in rules["contracts"][0]["layers"]]
    found = set()
    for path in FILES:
        package = path.relative_to(SOURCE).parts[0]
        if package not in order or path == SOURCE / "common" / "plugins.py":
            continue
        for node in ast.walk(parsed(path)):
            text = node.value if isinstance(node, ast.Constant) else None
            match = (
                re.fullmatch(r"eke\.(\w+)((?:\.\w+)*)(?::\w*)?", text)
                if isinstance(text, str)
                else None
            )
            if match is None or match[1] not in order:
                continue
            module = SOURCE.joinpath(match[1], *match[2].split(".")[1:])
            exists = module.is_dir() or module.with_suffix(".py").exists()
            if exists and order.index(match[1]) < order.index(package):
                found.add((name_of(path), text))
    assert not {(file, text) for file, text in found if not file.startswith("rules/")}
