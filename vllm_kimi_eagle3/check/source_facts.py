# SPDX-License-Identifier: Apache-2.0
"""Reads out of a vLLM source tree, by ``ast``, what :mod:`.facts` holds.

vLLM builds its parser at run time from the type hints of its config classes
(``engine/arg_utils.py``). This module reads the same hints and follows the same rules, so a flag
means here what it means there. Where a tree does something that it does not know, the flag is
there all the same and takes any text.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_kimi_eagle3.contract import Sources

ARG_UTILS = "vllm.engine.arg_utils"
PARSER = "vllm.utils.argparse_utils"
SPECULATIVE = "vllm.config.speculative"
BACKENDS = "vllm.v1.attention.backends.registry"
REGISTRY = "vllm.model_executor.models.registry"
# Where the server's own flags are defined; it moved in 0.29 and again in 0.33.
FRONTENDS = (
    "vllm.entrypoints.openai.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.common.cli_args",
)

# Options with JSON whose keys are held against the class that vLLM makes of them.
_JSON_OPTIONS = {
    "compilation-config": ("vllm.config.compilation", "CompilationConfig"),
    "attention-config": ("vllm.config.attention", "AttentionConfig"),
    "kv-transfer-config": ("vllm.config.kv_transfer", "KVTransferConfig"),
}
_NUMBERS = ("integer", "count", "length", "number")

_BUILTIN = {"bool", "int", "float", "str", "dict", "list", "tuple", "set"}
_TYPING = {"Dict": "dict", "List": "list", "Tuple": "tuple", "Set": "set"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_MAX_DEPTH = 12  # Of aliases and imports that lead on to others; vLLM's go three deep.


def take_facts(sources: Sources) -> dict[str, Any]:
    """What a vLLM takes, as plain data. Empty where the tree has no such place."""
    reader = _Reader(sources)
    flags, defaults = _flags(reader)
    return {
        "speculative": _speculative(reader),
        "flags": flags,
        "defaults": defaults,
        "json_keys": _json_keys(reader),
        "drafters": sorted(_architectures(reader, ("_SPECULATIVE_DECODING_MODELS",))),
        "architectures": sorted(_architectures(reader, _registered(reader))),
        "attention_backends": _members(sources.node(f"{BACKENDS}:AttentionBackendEnum")),
        "kv_cache_dtypes": list(reader.hints("vllm.config.cache", _name("CacheDType")).choices),
        "habits": {
            "pairs_enable_with_disable": sources.node(f"{PARSER}:EnableDisableAction") is not None,
            "dashes_in_keys": "replace" in _calls(
                sources.node(f"{ARG_UTILS}:EngineArgs.create_speculative_config")
            ),
            "refuses_unknown_keys": "forbid" in _constants(_tree(sources, "vllm.config.utils")),
            "human_numbers": "human_readable_int" in _calls(
                sources.node(f"{PARSER}:FlexibleArgumentParser.parse_args")
            ),
            "yaml_objects": "dumps" in _calls(
                sources.node(f"{PARSER}:FlexibleArgumentParser.load_config_file")
            ),
            "yaml_negates": "--no-" in _constants(
                sources.node(f"{PARSER}:FlexibleArgumentParser.load_config_file")
            ),
        },
    }  # fmt: skip


def _name(text: str) -> ast.expr:
    return ast.Name(text, ast.Load())


def _tree(sources: Sources, module: str) -> ast.Module | None:
    parsed = sources.module(module)
    return None if parsed is None else parsed[1]


def _constants(node: ast.AST | None) -> set[str]:
    found = () if node is None else ast.walk(node)
    return {n.value for n in found if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _calls(node: ast.AST | None) -> set[str]:
    """The last names of what is called in ``node``."""
    found = () if node is None else ast.walk(node)
    return {_last_name(n.func) for n in found if isinstance(n, ast.Call)}


def _last_name(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


class _Hints:
    """A type hint: the types that it allows, and the values of its literals."""

    def __init__(self) -> None:
        self.types: list[str] = []
        self.literals: list[Any] = []
        self.items: list[str] = []  # The types of what a list, tuple or set holds.

    def add(self, other: _Hints) -> None:
        self.items += [t for t in other.items if t not in self.items]
        self.types += [t for t in other.types if t not in self.types]
        self.literals += [v for v in other.literals if v not in self.literals]

    def __contains__(self, name: str) -> bool:
        return name in self.types

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(str(value) for value in self.literals)


def _of_type(name: str) -> _Hints:
    hints = _Hints()
    hints.types.append(name)
    return hints


class _Reader:
    """Names, hints and defaults of a source tree, followed over modules."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._imports: dict[str, dict[str, tuple[str, str]]] = {}

    def find(self, module: str, name: str, depth: int = 0) -> tuple[str, ast.stmt] | None:
        """The module and the statement that define what ``name`` is in ``module``."""
        node = self.sources.node(f"{module}:{name}")
        if node is not None:
            return module, node
        imports = self.imports(module)
        # A star stands for whatever its module has.
        where, there = imports.get(name) or (imports.get("*", ("", ""))[0], name)
        if not where or not there or depth > _MAX_DEPTH:
            return None
        return self.find(where, there, depth + 1)

    def imports(self, module: str) -> dict[str, tuple[str, str]]:
        """What each imported name of ``module`` is: module and name there; "" for a module."""
        if module not in self._imports:
            parsed = self.sources.module(module)
            names: dict[str, tuple[str, str]] = {}
            for node in () if parsed is None else _imports_in(parsed[1]):
                if isinstance(node, ast.ImportFrom):
                    where = self._absolute(module, node)
                    names.update({a.asname or a.name: (where, a.name) for a in node.names})
                else:
                    names.update({a.asname or a.name: (a.name, "") for a in node.names})
            self._imports[module] = names
        return self._imports[module]

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module that an import names, also where it names it by its own place."""
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        is_package = self.sources.root.joinpath(*parts[1:], "__init__.py").is_file()
        keep = len(parts) - node.level + is_package
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])

    def hints(self, module: str, node: ast.expr | None, depth: int = 0) -> _Hints:
        """The types that the annotation ``node`` of ``module`` allows."""
        hints = _Hints()
        if depth > _MAX_DEPTH or node is None:
            return _of_type("other")
        if isinstance(node, ast.Constant):
            if node.value is None:
                return _of_type("None")
            if isinstance(node.value, str):
                with contextlib.suppress(SyntaxError):
                    return self.hints(module, ast.parse(node.value, mode="eval").body, depth + 1)
            return _of_type("other")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            hints.add(self.hints(module, node.left, depth + 1))
            hints.add(self.hints(module, node.right, depth + 1))
            return hints
        if isinstance(node, ast.Subscript):
            return self._generic(module, node, depth)
        if isinstance(node, ast.Name) and node.id in _BUILTIN:
            return _of_type(node.id)
        return self._named(module, node, depth)

    def _generic(self, module: str, node: ast.Subscript, depth: int) -> _Hints:
        name = _last_name(node.value)
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        hints = _Hints()
        if name in ("Annotated", "SkipValidation"):
            return self.hints(module, inner[0], depth + 1)
        if name in ("Union", "Optional"):
            for part in inner:
                hints.add(self.hints(module, part, depth + 1))
            if name == "Optional":
                hints.add(_of_type("None"))
            return hints
        if name == "Literal":
            hints.types.append("literal")
            for part in inner:
                if isinstance(part, ast.Constant):
                    hints.literals.append(part.value)
                else:  # A literal of literals.
                    hints.add(self.hints(module, part, depth + 1))
            return hints
        hints = _of_type(_TYPING.get(name, name if name in _BUILTIN else "other"))
        if {"list", "tuple", "set"} & set(hints.types):
            hints.items = self.hints(module, inner[0], depth + 1).types
        return hints

    def _named(self, module: str, node: ast.expr, depth: int) -> _Hints:
        found: tuple[str, ast.stmt] | None = None
        if isinstance(node, ast.Name):
            found = self.find(module, node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            where, what = self.imports(module).get(node.value.id, ("", ""))
            if where:
                found = self.find(f"{where}.{what}" if what else where, node.attr)
        if found is None:
            return _of_type("other")
        where, statement = found
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            return self.hints(where, statement.value, depth + 1)
        if isinstance(statement, ast.ClassDef):
            if {"config", "dataclass"} & {_decorator(d) for d in statement.decorator_list}:
                return _of_type("dataclass")
            if "dict" in (_last_name(getattr(base, "value", base)) for base in statement.bases):
                return _of_type("mapping")
        return _of_type("other")

    def fields(self, module: str, name: str) -> dict[str, tuple[str, ast.AnnAssign, ast.stmt]]:
        """The fields of a dataclass and its bases, in order: module, annotation, class."""
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return {}
        where, node = found[0], found[1]
        fields: dict[str, tuple[str, ast.AnnAssign, ast.stmt]] = {}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id != name:
                fields.update(self.fields(where, base.id))
        for statement in node.body:
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and "ClassVar" not in ast.dump(statement.annotation)
            ):
                fields[statement.target.id] = (where, statement, node)
        return fields

    def value(self, module: str, node: ast.expr | None, scope: ast.AST | None = None) -> Any:
        """The plain value of an expression, or :data:`NOT_PLAIN`."""
        return self._value(module, node, scope, 0)

    def _value(self, module: str, node: ast.expr | None, scope: ast.AST | None, depth: int) -> Any:
        if node is None or depth > _MAX_DEPTH:
            return NOT_PLAIN
        with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(node)
            return value if isinstance(value, (bool, int, float, str, type(None))) else NOT_PLAIN
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            left = self._value(module, node.left, scope, depth + 1)
            right = self._value(module, node.right, scope, depth + 1)
            numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
            return left * right if numbers else NOT_PLAIN
        if isinstance(node, ast.Call) and _last_name(node.func) in ("Field", "field"):
            given = next((k.value for k in node.keywords if k.arg == "default"), None)
            first = node.args[0] if node.args else None
            return self._value(module, given or first, scope, depth + 1)
        if isinstance(node, ast.Call) and _last_name(node.func) == "get_field":
            if len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
                return self._field(module, node.args[0], str(node.args[1].value), depth)
            return NOT_PLAIN
        if isinstance(node, ast.Attribute):
            return self._field(module, node.value, node.attr, depth)
        if isinstance(node, ast.Name):
            for statement in getattr(scope, "body", ()):
                if isinstance(statement, ast.AnnAssign) and _last_name(statement.target) == node.id:
                    return self._value(module, statement.value, scope, depth + 1)
            found = self.find(module, node.id)
            if found is not None and isinstance(found[1], (ast.Assign, ast.AnnAssign)):
                return self._value(found[0], found[1].value, None, depth + 1)
        return NOT_PLAIN

    def _field(self, module: str, owner: ast.expr, name: str, depth: int) -> Any:
        if not isinstance(owner, ast.Name):
            return NOT_PLAIN
        entry = self.fields(module, owner.id).get(name)
        if entry is None:
            return NOT_PLAIN
        where, statement, scope = entry
        return self._value(where, statement.value, scope, depth + 1)


NOT_PLAIN: Any = object()
"""Stands for a value that the source computes."""


def _decorator(node: ast.expr) -> str:
    return _last_name(node.func if isinstance(node, ast.Call) else node)


def _imports_in(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of a module, outside its functions and classes."""
    todo: list[ast.AST] = [tree]
    while todo:
        for child in ast.iter_child_nodes(todo.pop()):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                yield child
            elif isinstance(child, (ast.If, ast.Try, ast.ExceptHandler, ast.With)):
                todo.append(child)


def _speculative(reader: _Reader) -> dict[str, dict[str, Any]]:
    keys: dict[str, dict[str, Any]] = {}
    for name, (module, node, scope) in reader.fields(SPECULATIVE, "SpeculativeConfig").items():
        hints = reader.hints(module, node.annotation)
        key: dict[str, Any] = {"types": hints.types}
        if "literal" in hints and "str" not in hints:
            key["choices"] = list(hints.choices)
        if (least := _least(node.value)) is not None:
            key["least"] = least
        default = reader.value(module, node.value, scope)
        if default is not NOT_PLAIN:
            key["default"] = default
        # What the engine or the config itself fills in is not validated.
        if _last_name(getattr(node.annotation, "value", None)) == "SkipValidation":
            key["own"] = True
        keys[name] = key
    return keys


def _json_keys(reader: _Reader) -> dict[str, list[str]]:
    """The keys that options with JSON take, by flag; none of those whose class takes others."""
    found: dict[str, list[str]] = {}
    for flag, (module, name) in _JSON_OPTIONS.items():
        class_ = reader.sources.node(f"{module}:{name}")
        decorators = [ast.dump(d) for d in getattr(class_, "decorator_list", ())]
        utils = _tree(reader.sources, "vllm.config.utils")
        if any("forbid" in d for d in decorators) or "forbid" in _constants(utils):
            fields = reader.fields(module, name)
            found[flag] = sorted(k for k, (_, node, _) in fields.items() if not _is_own(node.value))
    return found


def _is_own(node: ast.expr | None) -> bool:
    """True for a field that is no argument: ``field(init=False)``."""
    return isinstance(node, ast.Call) and any(
        k.arg == "init" and isinstance(k.value, ast.Constant) and k.value.value is False
        for k in node.keywords
    )


def _least(node: ast.expr | None) -> int | None:
    """The smallest integer that a ``Field(gt=..)`` or ``Field(ge=..)`` takes."""
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            bound = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg in ("gt", "ge") and isinstance(bound, int):
                return bound + (keyword.arg == "gt")
    return None


def _registered(reader: _Reader) -> tuple[str, ...]:
    node = reader.sources.node(f"{REGISTRY}:_VLLM_MODELS")
    value = getattr(node, "value", None)
    if not isinstance(value, ast.Dict):
        return ()
    return tuple(
        _last_name(part) for key, part in zip(value.keys, value.values, strict=True) if key is None
    )


def _members(node: ast.stmt | None) -> list[str]:
    """The members of an enumeration."""
    return [
        target.id
        for statement in getattr(node, "body", ())
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name) and not target.id.startswith("_")
    ]


def _architectures(reader: _Reader, names: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    for name in names:
        value = getattr(reader.sources.node(f"{REGISTRY}:{name}"), "value", None)
        if isinstance(value, ast.Dict):
            found |= {
                key.value
                for key in value.keys
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            }
    return found


class _Arguments:
    """What ``get_kwargs`` gives for the fields of a config class, with what is changed later."""

    def __init__(self, reader: _Reader, rules: _Rules, module: str, name: str) -> None:
        self._reader = reader
        self._rules = rules
        self._fields = reader.fields(module, name)
        self._taken: dict[str, dict[str, Any]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self._taken:
            self._taken[name] = self._take(name)
        return self._taken[name]

    def _take(self, name: str) -> dict[str, Any]:
        if name not in self._fields:
            return {}
        module, node, scope = self._fields[name]
        spec = self._rules.spec(name, self._reader.hints(module, node.annotation))
        spec.update(_of_default(self._reader.value(module, node.value, scope)))
        if spec["value"] in _NUMBERS and (bounds := self._bounds(module, node.value)):
            spec["bounds"] = bounds
        return spec

    def _bounds(self, module: str, node: ast.expr | None) -> dict[str, float]:
        """What a ``Field(gt=.., ge=.., lt=.., le=..)`` sets a number."""
        bounds: dict[str, float] = {}
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            bound = self._reader.value(module, keyword.value)
            if keyword.arg in ("gt", "ge", "lt", "le") and isinstance(bound, (int, float)):
                bounds[keyword.arg] = bound
        return bounds


class _Rules:
    """How this release makes a flag of a field: ``_compute_kwargs`` in ``arg_utils``."""

    def __init__(self, sources: Sources) -> None:
        node = (
            sources.node(f"{ARG_UTILS}:_compute_kwargs")
            or sources.node(f"{ARG_UTILS}:get_kwargs")
        )  # fmt: skip
        self._constants = _constants(node)
        self._calls = _calls(node)

    def spec(self, name: str, hints: _Hints) -> dict[str, Any]:
        spec = self._value(name, hints)
        if "None" in hints and "bool" not in hints:
            spec["nullable"] = True
        return spec

    def _value(self, name: str, hints: _Hints) -> dict[str, Any]:
        types = set(hints.types)
        if "mapping" in types and "is_dict_subclass" in self._calls:
            types = types - {"mapping"} | {"dict"}
        if "dataclass" in types:
            return {"value": "json"}
        if types == {"bool", "str", "None"} and "?" in self._constants:
            return {"value": "text", "nargs": "optional"}
        if "bool" in types:
            return {"value": "switch"}
        if "literal" in types:
            number = bool(hints.literals) and isinstance(hints.literals[0], int)
            spec: dict[str, Any] = {"value": "integer" if number else "text"}
            if "str" not in types:
                spec["choices"] = list(hints.choices)
            return spec
        if types & {"tuple", "list", "set"}:
            whole = "int" in hints.items and "str" not in hints.items
            return {"value": "integer" if whole else "text", "nargs": "list"}
        if "int" in types:
            if name == "max_model_len":
                return {"value": "length"}
            return {"value": "count" if name in self._constants else "integer"}
        if "float" in types:
            return {"value": "number"}
        if "dict" in types:
            plain = types <= {"dict", "None"}
            return {"value": "json" if plain else "json or text"}
        return {"value": "text"}


def _flags(reader: _Reader) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The flags of ``vllm serve`` by canonical name, and the defaults of those that have one."""
    rules = _Rules(reader.sources)
    found: dict[str, dict[str, Any]] = {"help": {"value": "set", "aliases": ["-h"]}}
    frontend = next((m for m in FRONTENDS if reader.sources.module(m) is not None), FRONTENDS[-1])
    for module, function in (
        (frontend, "make_arg_parser"),
        (ARG_UTILS, "EngineArgs.add_cli_args"),
        (ARG_UTILS, "AsyncEngineArgs.add_cli_args"),
    ):
        node = reader.sources.node(f"{module}:{function}")
        if isinstance(node, _FUNCTIONS):
            found.update(_Parser(reader, rules, module).run(node))
    found.update(_frontend_flags(reader, rules, frontend))
    defaults = {
        name: flag["default"]
        for name, flag in found.items()
        if "default" in flag and not flag.get("computed")
    }
    return {name: _plain(flag) for name, flag in found.items()}, defaults


def _plain(flag: Mapping[str, Any]) -> dict[str, Any]:
    """A flag as :mod:`.facts` holds it."""
    kept = ("value", "aliases", "choices", "nullable", "loose", "bounds")
    plain = {k: v for k, v in flag.items() if k in kept}
    if nargs := flag.get("nargs"):
        plain["value"] = "integers" if (nargs, flag["value"]) == ("list", "integer") else nargs
        plain.pop("choices", None)
    return plain


def _frontend_flags(reader: _Reader, rules: _Rules, module: str) -> dict[str, dict[str, Any]]:
    """The server's flags: one for each field of ``FrontendArgs``."""
    arguments = _Arguments(reader, rules, module, "FrontendArgs")
    for name in ("BaseFrontendArgs", "FrontendArgs"):
        scope = reader.sources.node(f"{module}:{name}")
        for function in getattr(scope, "body", ()):
            if isinstance(function, _FUNCTIONS):
                _Parser(reader, rules, module, {"frontend_kwargs": arguments}).run(function)
    return {name.replace("_", "-"): arguments[name] for name in arguments}


class _Parser:
    """Follows a function that adds arguments to vLLM's parser."""

    def __init__(
        self,
        reader: _Reader,
        rules: _Rules,
        module: str,
        names: Mapping[str, Any] | None = None,
    ) -> None:
        self._reader = reader
        self._rules = rules
        self._module = module
        self._names: dict[str, Any] = dict(names or {})
        self._flags: dict[str, dict[str, Any]] = {}

    def run(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, dict[str, Any]]:
        """The flags that ``function`` adds."""
        self._block(function.body)
        return self._flags

    def _block(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assign(node.targets[0], node.value)
            elif isinstance(node, ast.AugAssign):
                self._change(node.target, None)
            elif isinstance(node, ast.Delete):
                for target in node.targets:
                    self._change(target, None)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self._call(node.value)
            elif isinstance(node, (ast.If, ast.With)):
                self._block(node.body)
                self._block(getattr(node, "orelse", []))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            known = self._look_up(value)
            if known is not None and target.id not in ("frontend_kwargs", "parser"):
                self._names[target.id] = known
        else:
            self._change(target, value)

    def _look_up(self, node: ast.expr) -> Any:
        """The arguments of a class, or of one field, that an expression stands for."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Call) and _last_name(node.func) == "get_kwargs" and node.args:
            return _Arguments(
                self._reader, self._rules, self._module, _last_name(node.args[0])
            )  # fmt: skip
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner = self._look_up(node.value)
            return owner[str(node.slice.value)] if isinstance(owner, _Arguments) else None
        return None

    def _change(self, target: ast.expr, value: ast.expr | None) -> None:
        """``arguments["field"]["key"] = value``, or a change that is not followed: None."""
        if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Constant):
            return
        spec = self._look_up(target.value)
        if isinstance(spec, dict):
            self._set(spec, str(target.slice.value), value)

    def _set(self, spec: dict[str, Any], key: str, value: ast.expr | None) -> None:
        if key == "choices":
            spec.pop("choices", None)
            if isinstance(value, (ast.List, ast.Tuple)):
                with contextlib.suppress(ValueError):
                    spec["choices"] = [str(v) for v in ast.literal_eval(value)]
        elif key == "nargs":
            nargs = value.value if isinstance(value, ast.Constant) else None
            if spec.get("nargs") != "append":
                spec["nargs"] = {"+": "list", "*": "list", "?": "optional"}.get(str(nargs), "")
        elif key == "action":
            spec.update(_of_action(value))
        elif key == "type" and value is not None:
            spec.pop("nullable", None)
            spec.update(_of_type_function(value))
        elif key == "default":
            spec.pop("computed", None)
            spec.update(_of_default(self._reader.value(self._module, value)))

    def _call(self, call: ast.Call) -> None:
        name = _last_name(call.func)
        if name == "add_argument":
            self._add(call)
        elif isinstance(call.func, ast.Attribute):
            self._change(call.func.value, None)  # choices.remove(..) and the like.

    def _add(self, call: ast.Call) -> None:
        spellings = [
            a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
        ]
        longs = [s for s in spellings if s.startswith("--")]
        if not longs:
            return
        spec: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                self._merge(spec, keyword.value)
            else:
                self._set(spec, keyword.arg, keyword.value)
        spec.setdefault("value", "text")
        spec.setdefault("default", None)  # As argparse has it.
        aliases = [s for s in spellings if s != longs[0]]
        if aliases:
            spec["aliases"] = aliases
        self._flags[longs[0].removeprefix("--")] = spec

    def _merge(self, spec: dict[str, Any], node: ast.expr) -> None:
        """``**node`` among the keywords of a call."""
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:
                    self._merge(spec, value)
                elif isinstance(key, ast.Constant):
                    self._set(spec, str(key.value), value)
            return
        known = self._look_up(node)
        if isinstance(known, dict):
            spec.update(known)


def _of_default(value: Any) -> dict[str, Any]:
    return {"default": None, "computed": True} if value is NOT_PLAIN else {"default": value}


def _of_action(node: ast.expr | None) -> dict[str, Any]:
    if isinstance(node, ast.Constant) and node.value in ("store_true", "store_false"):
        return {"value": "set", "default": node.value == "store_false"}
    if isinstance(node, ast.Constant) and node.value == "append":
        return {"nargs": "append"}
    if _last_name(node) == "BooleanOptionalAction":
        return {"value": "switch"}
    return {}


def _of_type_function(node: ast.expr) -> dict[str, Any]:
    """What a function that argparse calls on the text makes of it."""
    if isinstance(node, ast.Lambda):
        # As that of --moe-backend: lambda s: s.lower().replace("-", "_")
        return {"value": "text", "loose": {"lower", "replace"} <= _calls(node)}
    nullable = isinstance(node, ast.Call) and _last_name(node.func) == "optional_type"
    if isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    # Of others, such as parse_reasoning_parser, no more is known than that they take a text.
    value = {"int": "integer", "float": "number", "loads": "json"}.get(_last_name(node), "text")
    return {"value": value, "nullable": True} if nullable else {"value": value}
