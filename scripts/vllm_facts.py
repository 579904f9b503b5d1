"""Write what vLLM releases say about their own flags and variables to `cachemgr/factors/vllm/facts.json`.

    python scripts/vllm_facts.py SOURCES_DIR

SOURCES_DIR holds <version>/vllm/**.py, as `scripts/vllm_sources.py` makes it. Nothing of it is imported: classes, type
aliases, `add_argument` calls and `compute_hash` methods are read by `ast`. Where a hash holds a field only under a
condition, or only something derived from it, the field counts as not hashed.
"""

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

VERSIONS = ("0.26.0", "0.28.0", "0.31.0", "0.32.0", "0.33.0")
TARGET = Path(__file__).parent.parent / "cachemgr" / "factors" / "vllm" / "facts.json"

# Where a front end defines its flags: the first module that exists, and a class with fields or a function with calls.
FRONT_ENDS = {
    "serve": (
        ("entrypoints.common.cli_args", "entrypoints.launchers.cli_args", "entrypoints.openai.cli_args"),
        ("FrontendArgs", "make_arg_parser"),
    ),
    "run-batch": (("entrypoints.launchers.run_batch", "entrypoints.openai.run_batch"), ("BatchFrontendArgs",)),
    "grpc": (("entrypoints.launchers.grpc_server", "entrypoints.grpc_server"), ("main",)),
    "bench latency": (("benchmarks.latency",), ("add_cli_args",)),
    "bench throughput": (("benchmarks.throughput",), ("add_cli_args",)),
    "bench forward": (("benchmarks.forward.main",), ("add_cli_args",)),
}


@dataclass(frozen=True)
class Flag:
    """One option as one version has it."""

    name: str
    owner: str
    takes: str
    aliases: tuple[str, ...]
    feeds: str | None
    default: object
    hashed: bool


@dataclass(frozen=True)
class Key:
    """One key of an option that takes JSON, as one version has it."""

    flag: str
    key: str
    hashed: bool


@dataclass
class Scope:
    """A module of one version, and where to find others."""

    root: Path
    name: str
    tree: ast.Module
    names: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)


@cache
def scope(root: Path, name: str) -> Scope | None:
    base = root.joinpath("vllm", *name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            break
    else:
        return None
    made = Scope(root, name, ast.parse(path.read_text()))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for statement in ast.walk(made.tree):
        if isinstance(statement, ast.ImportFrom):
            source = _source(statement, package)
            for alias in statement.names:
                made.imports.setdefault(alias.asname or alias.name, (source, alias.name))
    for statement in _top(made.tree.body):
        for bound in _bound(statement):
            made.names[bound] = statement
    return made


def _source(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return (statement.module or "").removeprefix("vllm").removeprefix(".")
    parts = package.split(".")
    parts = parts[: len(parts) - statement.level + 1]
    return ".".join([*parts, *([statement.module] if statement.module else [])])


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those behind TYPE_CHECKING last so that they win."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _top(statement.orelse)
            yield from _top(statement.body)
        else:
            yield statement


def _bound(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        return [statement.name]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []


def resolve(where: Scope, name: str, depth: int = 0) -> tuple[Scope, ast.stmt] | None:
    """The statement that gives `name` its meaning, through imports from vLLM itself."""
    if name in where.names:
        return where, where.names[name]
    if name in where.imports and depth < 6:
        module, original = where.imports[name]
        found = scope(where.root, module)
        if found is not None and found is not where:
            return resolve(found, original, depth + 1)
    return None


def hints(where: Scope, annotation: ast.expr | None) -> dict[str, tuple[Scope, ast.ClassDef] | None]:
    """The parts of a type, as `get_type_hints` of vLLM's engine/arg_utils.py sees them; configs with their class."""
    found: dict[str, tuple[Scope, ast.ClassDef] | None] = {"other": None}
    match annotation:
        case ast.Constant(value=None):
            found = {"None": None}
        case ast.Constant(value=str(text)):
            found = hints(where, ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, right=right):
            found = {**hints(where, left), **hints(where, right)}
        case ast.Subscript(value=value, slice=inner):
            found = _generic(where, ast.unparse(value).rpartition(".")[2], inner)
        case ast.Attribute(attr=name):
            found = {name: None}
        case ast.Name(id=name):
            found = _named(where, name)
    return found


def _generic(where: Scope, name: str, inner: ast.expr) -> dict[str, tuple[Scope, ast.ClassDef] | None]:
    parts = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
    if name in {"Annotated", "SkipValidation", "InitVar", "ClassVar"}:
        return hints(where, parts[0])
    if name in {"Union", "Optional"}:
        found = {"None": None} if name == "Optional" else {}
        for part in parts:
            found.update(hints(where, part))
        return found
    return {name.lower() if name in {"List", "Dict", "Tuple", "Set"} else name: None}


def _named(where: Scope, name: str) -> dict[str, tuple[Scope, ast.ClassDef] | None]:
    if name in {"bool", "int", "str", "float", "list", "tuple", "set", "dict"}:
        return {name: None}
    found = resolve(where, name)
    match found:
        case (inside, ast.ClassDef() as made):
            if any("config" in ast.unparse(each) or "dataclass" in ast.unparse(each) for each in made.decorator_list):
                return {"config": (inside, made)}
            bases = {ast.unparse(base) for base in made.bases}
            return {"dict" if "dict" in {base.partition("[")[0] for base in bases} else "other": None}
        case (inside, ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value)):
            return hints(inside, value)
    return {"other": None}


def fields(where: Scope, made: ast.ClassDef) -> dict[str, tuple[Scope, ast.expr, ast.expr | None]]:
    """Fields of a config class and its bases: where declared, type, default."""
    found: dict[str, tuple[Scope, ast.expr, ast.expr | None]] = {}
    for base in made.bases:
        match resolve(where, ast.unparse(base)):
            case (inside, ast.ClassDef() as parent):
                found.update(fields(inside, parent))
    for statement in made.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                if not ast.unparse(annotation).startswith(("ClassVar", "InitVar")):
                    found[name] = (where, annotation, value)
    return found


def literal(where: Scope, value: ast.expr | None) -> object:
    """A default that is a plain word, number, switch or member of an enumeration; None for everything else."""
    match value:
        case ast.Attribute(value=ast.Name(id=name), attr=member):
            match resolve(where, name):
                case (inside, ast.ClassDef() as made):
                    return next(
                        (
                            literal(inside, each.value)
                            for each in made.body
                            if isinstance(each, ast.Assign) and member in _bound(each)
                        ),
                        None,
                    )
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in {"Field", "field"}:
        given = [each.value for each in value.keywords if each.arg == "default"] or list(value.args)
        return literal(where, given[0]) if given else None
    try:
        found = ast.literal_eval(value) if value is not None else None
    except ValueError:
        return None
    return found if isinstance(found, (bool, int, float, str)) else None


# Mirrors `_compute_kwargs` of vLLM's engine/arg_utils.py.
HUMAN = {
    "max_num_batched_tokens", "max_num_scheduled_tokens", "kv_cache_memory_bytes", "safetensors_prefetch_block_size",
    "max_num_queued_tokens",
}  # fmt: skip


def takes(name: str, parts: dict[str, tuple[Scope, ast.ClassDef] | None]) -> str:
    kinds = set(parts)
    if "config" in kinds:
        kind = "json"
    elif kinds == {"bool", "str", "None"}:
        return "optional"
    elif "bool" in kinds:
        return "switch"
    elif "Literal" in kinds:
        kind = "text"
    elif kinds & {"tuple", "list", "set"}:
        kind = "many"
    elif "int" in kinds:
        kind = "human-auto" if name == "max_model_len" else "human" if name in HUMAN else "int"
    elif "float" in kinds:
        kind = "float"
    elif "dict" in kinds:
        kind = "json-or-text" if kinds & {"str", "other", "Callable"} else "json"
    else:
        kind = "text"
    return kind + "?" if "None" in kinds else kind


@dataclass
class Version:
    """The sources of one version."""

    root: Path
    fed: dict[str, str] = field(default_factory=dict)
    hashes: set[str] = field(default_factory=set)
    delegates: set[str] = field(default_factory=set)
    """Fields that are hashed by the `compute_hash` of their own class."""

    def config(self, name: str) -> tuple[Scope, ast.ClassDef] | None:
        package = scope(self.root, "config")
        assert package is not None
        for where in (package, scope(self.root, "engine.arg_utils")):
            assert where is not None
            match resolve(where, name):
                case (inside, ast.ClassDef() as made):
                    return inside, made
        return None


def read(root: Path) -> tuple[list[Flag], list[Key]]:
    version = Version(root)
    engine = scope(root, "engine.arg_utils")
    assert engine is not None
    version.fed = _fed(engine)
    _hash_of(version, "VllmConfig", set())
    flags = []
    for name in ("EngineArgs", "AsyncEngineArgs"):
        function = _method(engine.names[name], "add_cli_args")
        flags += _calls(version, engine, function, "engine")
    for owner, (modules, names) in FRONT_ENDS.items():
        where = next((found for module in modules if (found := scope(root, module)) is not None), None)
        if where is not None:
            flags += _front_end(version, where, names, owner)
    parsing = scope(root, "utils.argparse_utils")
    assert parsing is not None
    if "EnableDisableAction" in parsing.names:
        flags = [_paired(flag) for flag in flags]
    keys = [key for flag in flags for key in _keys(version, flag)]
    return flags, keys


def _paired(flag: Flag) -> Flag:
    """`--enable-x` that also understands `--disable-x` (EnableDisableAction in utils/argparse_utils.py)."""
    paired = flag.takes == "switch" and flag.name.startswith(("enable-", "disable-"))
    return replace(flag, takes="pair") if paired else flag


def _method(made: ast.stmt, name: str) -> ast.FunctionDef:
    assert isinstance(made, ast.ClassDef)
    return next(each for each in made.body if isinstance(each, ast.FunctionDef) and each.name == name)


def _front_end(version: Version, where: Scope, names: tuple[str, ...], owner: str) -> Iterator[Flag]:
    for name in names:
        match resolve(where, name):
            case (inside, ast.ClassDef() as made):
                yield from _class_flags(inside, made, owner)
            case (inside, ast.FunctionDef() as function):
                yield from _calls(version, inside, function, owner)


def _class_flags(where: Scope, made: ast.ClassDef, owner: str) -> Iterator[Flag]:
    """One flag per field, changed by `_customize_cli_kwargs` of the class and its bases."""
    changed = _customized(where, made)
    for name, (inside, annotation, value) in fields(where, made).items():
        how = takes(name, hints(inside, annotation))
        change = changed.get(name, {})
        if change.get("action") == "'append'":
            how = "append"
        elif change.get("action") == "'store_true'":
            how = "flag"
        elif change.get("type") == "json.loads":
            how = "json?" if how.endswith("?") else "json"
        elif change.get("nargs") == "":
            how = "text"
        aliases = tuple(ast.literal_eval(change.get("flags", "()")))
        yield Flag(name.replace("_", "-"), owner, how, aliases, None, literal(inside, value), hashed=False)


def _customized(where: Scope, made: ast.ClassDef) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for base in made.bases:
        match resolve(where, ast.unparse(base)):
            case (inside, ast.ClassDef() as parent):
                found.update(_customized(inside, parent))
    for statement in ast.walk(made):
        match statement:
            case ast.Assign(targets=[ast.Subscript(value=ast.Subscript(slice=ast.Constant(value=name)), slice=key)]):
                found.setdefault(str(name), {})[ast.literal_eval(key)] = ast.unparse(statement.value)
            case ast.Delete(targets=[ast.Subscript(value=ast.Subscript(slice=ast.Constant(value=name)), slice=key)]):
                found.setdefault(str(name), {})[ast.literal_eval(key)] = ""
    return found


def _calls(version: Version, where: Scope, function: ast.FunctionDef, owner: str) -> Iterator[Flag]:
    """The flags of every `add_argument` in `function`."""
    classes: dict[str, str] = {}
    entries: dict[str, tuple[str, str]] = {}
    changed: dict[tuple[str, str], dict[str, str]] = {}
    for statement in ast.walk(function):
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Name(id="get_kwargs"), args=[ast.Name(id=made)]),
            ):
                classes[name] = made
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() as entry) if found := _entry(
                entry, classes
            ):
                entries[name] = found
            case ast.Assign(targets=[ast.Subscript(value=inner, slice=ast.Constant(value=key))]) if found := _entry(
                inner, classes, entries
            ):
                changed.setdefault(found, {})[str(key)] = ast.unparse(statement.value)
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            words = [each.value for each in call.args if isinstance(each, ast.Constant)]
            if words and str(words[0]).startswith("-"):
                yield _flag(version, where, call, owner, (classes, entries, changed))


def _entry(
    node: ast.expr, classes: dict[str, str], entries: dict[str, tuple[str, str]] | None = None
) -> tuple[str, str] | None:
    """The class and field that `x_kwargs["field"]` stands for."""
    match node:
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=key)) if name in classes:
            return classes[name], str(key)
        case ast.Subscript(
            value=ast.Call(func=ast.Name(id="get_kwargs"), args=[ast.Name(id=made)]), slice=ast.Constant(value=key)
        ):
            return made, str(key)
        case ast.Name(id=name) if entries and name in entries:
            return entries[name]
    return None


Names = tuple[dict[str, str], dict[str, tuple[str, str]], dict[tuple[str, str], dict[str, str]]]


def _flag(version: Version, where: Scope, call: ast.Call, owner: str, names: Names) -> Flag:
    classes, entries, changed = names
    spelled = [str(each.value) for each in call.args if isinstance(each, ast.Constant)]
    long = next((word for word in spelled if word.startswith("--")), spelled[0])
    given: dict[str, ast.expr] = {}
    source: tuple[str, str] | None = None
    for keyword in call.keywords:
        if keyword.arg is not None:
            given[keyword.arg] = keyword.value
        elif isinstance(keyword.value, ast.Dict):
            for key, value in zip(keyword.value.keys, keyword.value.values, strict=True):
                if key is None:
                    source = _entry(value, classes, entries)
                else:
                    given[ast.literal_eval(key)] = value
        else:
            source = _entry(keyword.value, classes, entries)
    for key, text in changed.get(source, {}).items() if source else ():
        given.setdefault(key, ast.parse(text, mode="eval").body)
    how, default = _own(where, given)
    feeds = None
    if source is not None:
        how, default, feeds = _from_field(version, source, given)
    if feeds is None and owner == "engine":
        dest = ast.literal_eval(given["dest"]) if "dest" in given else long[2:].replace("-", "_")
        feeds = version.fed.get(dest)
    aliases = tuple(word for word in spelled if word != long)
    name = long.lstrip("-").replace("_", "-")
    return Flag(name, owner, how, aliases, feeds, default, hashed=feeds in version.hashes)


def _from_field(version: Version, source: tuple[str, str], given: dict[str, ast.expr]) -> tuple[str, object, str]:
    found = version.config(source[0])
    assert found is not None, source
    inside, annotation, value = fields(*found)[source[1]]
    how, default = takes(source[1], hints(inside, annotation)), literal(inside, value)
    if "type" in given:
        text = ast.unparse(given["type"])
        how = "json" if "json.loads" in text else "text"
        how += "?" if "optional_type" in text else ""
    if "default" in given:
        default = literal(inside, given["default"])
    return how, default, ".".join(source)


def _own(where: Scope, given: dict[str, ast.expr]) -> tuple[str, object]:
    """How an option takes its value that says so itself."""
    action = ast.unparse(given["action"]).strip("'\"") if "action" in given else ""
    default = literal(where, given.get("default"))
    if action == "store_true":
        return "flag", False if default is None else default
    if action.endswith("BooleanOptionalAction"):
        return "switch", default
    if action == "append":
        return "append", None
    if "nargs" in given:
        return ("optional" if ast.unparse(given["nargs"]) == "'?'" else "many"), default
    kind = ast.unparse(given["type"]) if "type" in given else "str"
    return {"int": "int", "float": "float", "json.loads": "json"}.get(kind, "text"), default


def _fed(engine: Scope) -> dict[str, str]:
    """Which field of which config an attribute of EngineArgs is handed to, where it is handed over by name."""
    found: dict[str, str] = {}
    for call in ast.walk(engine.names["EngineArgs"]):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or not call.func.id.endswith("Config"):
            continue
        for keyword in call.keywords:
            match keyword:
                case ast.keyword(arg=str(name), value=ast.Attribute(value=ast.Name(id="self"), attr=attribute)):
                    found.setdefault(attribute, f"{call.func.id}.{name}")
    return found


def _hash_of(version: Version, name: str, seen: set[str]) -> None:
    """Add the fields that `compute_hash` of the class holds, and those of the configs it reaches."""
    found = version.config(name)
    if found is None or name in seen:
        return
    seen.add(name)
    where, made = found
    declared = fields(where, made)
    function = next(
        (each for each in made.body if isinstance(each, ast.FunctionDef) and each.name == "compute_hash"), None
    )
    if function is None:
        return
    ignored = _ignored(function)
    held = set(declared) - ignored if ignored is not None else set()
    held |= {field for field in _listed(function, name) if field in declared}
    delegated = _delegated(function)
    for each in held | (delegated & set(declared)):
        for inside in _configs(declared[each]):
            if each in delegated:
                _hash_of(version, inside, seen)
            else:
                _whole(version, inside)
    version.hashes |= {f"{name}.{each}" for each in held}
    version.delegates |= {f"{name}.{each}" for each in delegated}
    version.hashes |= _foreign(function, name)


def _ignored(function: ast.FunctionDef) -> set[str] | None:
    """The fields that an opt-out hash leaves out, or None when the hash is no opt-out."""
    left_out: set[str] = set()
    opt_out = False
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id="get_hash_factors")):
                opt_out = True
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Set(elts=elements)) if "ignored" in name:
                left_out |= {ast.literal_eval(each) for each in elements}
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Set(elts=elements)) if "ignored" in name:
                left_out |= {ast.literal_eval(each) for each in elements}
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="add"), args=[ast.Constant(value=str(text))]
            ) if "ignored" in name:
                left_out.add(text)
    return left_out if opt_out else None


def _listed(function: ast.FunctionDef, name: str) -> Iterator[str]:
    """Fields that are appended as they are, without a condition on another field."""
    for statement in function.body:
        if not isinstance(statement, ast.If):
            for value in _values(statement) if name != "VllmConfig" else ():
                yield from _plain(value)
        elif name == "VllmConfig":
            yield from _given(statement)
        elif name == "SpeculativeConfig":
            yield from _draft(statement)


def _values(statement: ast.stmt) -> Iterator[ast.expr]:
    for node in ast.walk(statement):
        match node:
            case ast.Call(func=ast.Attribute(attr="append"), args=[argument]):
                yield argument
            case ast.Call(func=ast.Name(id="hash_factors"), args=[ast.Dict(values=values)]):
                yield from values
            case ast.AnnAssign(value=ast.List(elts=elements)):
                yield from elements


def _given(statement: ast.If) -> Iterator[str]:
    """`if self.additional_config:` whose whole text is hashed."""
    match statement.test:
        case ast.Attribute(value=ast.Name(id="self"), attr=attribute) if "json.dumps" in ast.unparse(statement):
            yield attribute


def _draft(statement: ast.If) -> Iterator[str]:
    """The draft model's own hash holds its name, where it is taken for every method."""
    if ast.unparse(statement.test) == "self.draft_model_config is not None":
        text = ast.unparse(statement)
        if "self.draft_model_config.compute_hash()" in text:
            yield "model"


def _plain(value: ast.expr) -> Iterator[str]:
    match value:
        case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
            yield attribute
        case ast.IfExp(body=body, test=test):
            names = {
                node.attr
                for node in ast.walk(value)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
            }
            if len(names) == 1 and "compute_hash" not in ast.unparse(body) and test is not None:
                yield from names


def _delegated(function: ast.FunctionDef) -> set[str]:
    """Fields whose own `compute_hash` is asked."""
    found = set()
    for node in ast.walk(function):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=attribute), attr="compute_hash")
            ):
                found.add(attribute)
    return found - {"draft_model_config"}


def _foreign(function: ast.FunctionDef, name: str) -> set[str]:
    """`factors["x"] = self.multimodal_config.x` in the hash of the model."""
    found = set()
    for node in ast.walk(function) if name == "ModelConfig" else ():
        match node:
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Name(id="factors"))],
                value=ast.Attribute(value=ast.Attribute(attr="multimodal_config"), attr=attribute),
            ):
                found.add(f"MultiModalConfig.{attribute}")
    return found


def _configs(declared: tuple[Scope, ast.expr, ast.expr | None]) -> list[str]:
    found = hints(declared[0], declared[1]).get("config")
    return [found[1].name] if found else []


def _whole(version: Version, name: str) -> None:
    """A config inside an opt-out hash is hashed with all its fields (`normalize_value`, config/utils.py)."""
    found = version.config(name)
    for each, declared in fields(*found).items() if found else ():
        if f"{name}.{each}" not in version.hashes:
            version.hashes.add(f"{name}.{each}")
            for inside in _configs(declared):
                _whole(version, inside)


def _keys(version: Version, flag: Flag) -> Iterator[Key]:
    """The keys of an option whose value is a config, to the second level."""
    if flag.feeds is None or not flag.takes.startswith("json"):
        return
    name, _, attribute = flag.feeds.partition(".")
    found = version.config(name)
    for made in _configs(fields(*found)[attribute]) if found else ():
        yield from _keys_of(version, flag.name, made, "", reached=_reached(version, flag.feeds))


def _reached(version: Version, place: str) -> bool:
    return place in version.hashes or place in version.delegates


def _keys_of(version: Version, flag: str, made: str, prefix: str, *, reached: bool) -> Iterator[Key]:
    found = version.config(made)
    for name, declared in fields(*found).items() if found else ():
        if name.startswith(("_", "draft_", "target_")):  # private, or filled in by vLLM itself
            continue
        place = f"{made}.{name}"
        yield Key(flag, prefix + name, reached and place in version.hashes)
        for inside in _configs(declared) if not prefix else ():
            below = reached and _reached(version, place)
            yield from _keys_of(version, flag, inside, f"{prefix}{name}.", reached=below)


def variables(root: Path) -> tuple[dict[str, bool], list[str]]:
    """Every variable of vllm/envs.py and whether `compile_factors` hashes it, and the list of Ray's variables."""
    envs = scope(root, "envs")
    assert envs is not None
    match envs.names["environment_variables"]:
        case ast.AnnAssign(value=ast.Dict(keys=keys)) | ast.Assign(value=ast.Dict(keys=keys)):
            known = [ast.literal_eval(key) for key in keys if key is not None]
    function = envs.names["compile_factors"]
    assert isinstance(function, ast.FunctionDef)
    ignored: set[str] = set()
    noset: list[str] = []
    for node in ast.walk(function):
        match node:
            case ast.AnnAssign(target=ast.Name(id="ignored_factors"), value=ast.Set(elts=elements)):
                ignored = {ast.literal_eval(each) for each in elements}
            case ast.Assign(targets=[ast.Name(id="ray_noset_env_vars")], value=ast.List(elts=elements)):
                noset = [ast.literal_eval(each) for each in elements]
    return {name: name not in ignored for name in known}, noset


def breakable(root: Path) -> set[str]:
    """Architectures that run without torch.compile by default: vLLM gives them breakable CUDA graphs instead."""
    config = scope(root, "config.vllm")
    assert config is not None
    inside: list[ast.AST] = [config.names.get("DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES", ast.Pass())]
    for node in ast.walk(config.names["VllmConfig"]):
        if isinstance(node, ast.If) and "VLLM_USE_BREAKABLE_CUDAGRAPH" in ast.unparse(node.test):
            inside += [each for each in ast.walk(node.test) if isinstance(each, ast.Tuple)]
    return {each.value for part in inside for each in ast.walk(part) if isinstance(each, ast.Constant)}


def same_level(root: Path) -> bool:
    """Whether `-O3` sets what `-O2` sets."""
    config = scope(root, "config.vllm")
    assert config is not None
    two, three = (ast.unparse(config.names[f"OPTIMIZATION_LEVEL_0{level}"]).partition(" = ")[2] for level in (2, 3))
    return two == three


def spans(found: set[str]) -> str:
    """Versions as ranges: `0.26.0-0.31.0,0.33.0`; `*` is all of them."""
    if found == set(VERSIONS):
        return "*"
    runs: list[list[str]] = []
    for at, version in enumerate(VERSIONS):
        if version in found:
            if runs and at and VERSIONS[at - 1] == runs[-1][-1]:
                runs[-1].append(version)
            else:
                runs.append([version])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def collect(sources: Path) -> str:
    """The text of facts.json."""
    rows: dict[str, dict[object, set[str]]] = {"flags": {}, "keys": {}, "variables": {}, "breakable": {}}
    for version in VERSIONS:
        flags, keys = read(sources / version)
        for flag in flags:
            rows["flags"].setdefault(flag, set()).add(version)
        for key in keys:
            rows["keys"].setdefault(key, set()).add(version)
        known, noset = variables(sources / version)
        for name, hashed in [*known.items(), *((name, True) for name in noset)]:
            rows["variables"].setdefault((name, hashed), set()).add(version)
        for name in breakable(sources / version):
            rows["breakable"].setdefault(name, set()).add(version)
    tables: dict[str, list[list[object]]] = {
        "flags": [
            [row.name, row.owner, row.takes, list(row.aliases), row.feeds, row.default, row.hashed, spans(where)]
            for row, where in rows["flags"].items()
            if isinstance(row, Flag)
        ],
        "keys": [
            [row.flag, row.key, row.hashed, spans(where)] for row, where in rows["keys"].items() if isinstance(row, Key)
        ],
        "variables": [[*row, spans(where)] for row, where in rows["variables"].items() if isinstance(row, tuple)],
        "breakable": [[row, spans(where)] for row, where in rows["breakable"].items()],
    }
    equal = spans({version for version in VERSIONS if same_level(sources / version)})
    parts = [f'"versions": {json.dumps(VERSIONS)}', f'"level_3_is_2": {json.dumps(equal)}']
    for name, table in tables.items():
        lines = ",\n".join(json.dumps(row) for row in sorted(table, key=json.dumps))
        parts.append(f'"{name}": [\n{lines}\n]')
    return "{" + ",\n".join(parts) + "}\n"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    TARGET.write_text(collect(Path(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
