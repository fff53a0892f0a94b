# SPDX-License-Identifier: Apache-2.0
"""Take from the supported vLLM releases which attention back-end they choose on which GPU.

    python tools/attention.py --sources FOLDER  # FOLDER/<release>/vllm holds the sources

Writes ``vllm_kimi_eagle3/check/attention.json``. The answers are those of the releases' own
functions: their priority lists and their back-end classes are imported with everything else
replaced by stand-ins (no torch, no compiled code, no GPU), each release in a process of its own,
and asked for every compute capability in turn. ``tools/contract.py`` downloads sources.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import itertools
import json
import subprocess
import sys
import textwrap
import types
import typing
from abc import ABCMeta
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from vllm_kimi_eagle3.host import SUPPORTED  # noqa: E402

TABLE = REPOSITORY / "vllm_kimi_eagle3" / "check" / "attention.json"

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
KV_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
DTYPES = ("bfloat16", "float16", "float32")
HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256, 576)
# TURBOQUANT takes only its own KV-cache dtypes, and the sparse ones no dense model.
BACKENDS = (
    "FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "TRITON_MLA",
    "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION",
)  # fmt: skip
PAGE_SIZES = (1, 8, 16, 32, 64, 128, 256)

# The modules whose own code answers; all others are stand-ins.
REAL = (
    "vllm.config.cache",
    "vllm.envs",
    "vllm.model_executor.layers.attention.mla_attention",
    "vllm.platforms.cuda",
    "vllm.platforms.interface",
    "vllm.utils.flashinfer",
    "vllm.v1.attention.backend",
    "vllm.v1.attention.backends",
    "vllm.v1.attention.ops.flashmla",
)
# What stands for torch and for compiled code: whatever is not the standard library's.
STANDARD = frozenset(sys.stdlib_module_names)


class _StandInType(ABCMeta):
    """Stand-ins are classes, so that they can be called, subscripted and inherited from."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = stand_in(f"{cls.__name__}.{name}")
        setattr(cls, name, made)
        return made

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls

    def __lt__(cls, other: object) -> bool:
        return False

    def __le__(cls, other: object) -> bool:
        return False

    __gt__, __ge__ = __lt__, __le__

    def register(cls, *args: Any, **kwargs: Any) -> Any:
        return lambda decorated: decorated

    def __repr__(cls) -> str:
        return cls.__name__


def stand_in(name: str) -> Any:
    """Something that can be used as anything."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__dict__.get("_stand_in"):
            # A decorator without arguments gives back what it decorates.
            decorates = len(args) == 1 and not kwargs
            decorates = decorates and (callable(args[0]) or isinstance(args[0], classmethod))
            return args[0] if decorates else cls
        return object.__new__(cls)

    body = {"__new__": new, "_stand_in": True, "__init__": lambda self, *a, **k: None}
    return _StandInType(name, (), body)


class _StandInModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = stand_in(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves the real modules of a release and stand-ins for all others."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in STANDARD:
            return None
        if name == "tokenspeed_mla":  # Not in vLLM's requirements.
            raise ImportError(name)
        if any(name == real or name.startswith(f"{real}.") for real in REAL):
            base = self.root.joinpath(*name.split(".")[1:])
            for file in (base.with_suffix(".py"), base / "__init__.py"):
                if file.exists():
                    package = [str(base)] if file.name == "__init__.py" else None
                    return importlib.util.spec_from_file_location(
                        name, file, submodule_search_locations=package
                    )
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


class _Platform:
    """``current_platform`` of a machine with GPUs of one compute capability."""

    def __init__(self, capability: Any) -> None:
        self.capability = capability

    def is_cuda(self) -> bool:
        return True

    is_cuda_alike = is_cuda

    def get_device_capability(self, device_id: int = 0) -> Any:
        return self.capability

    def is_device_capability(self, number: Any) -> bool:
        return self._number == _as_number(number)

    def has_device_capability(self, number: Any) -> bool:
        return self._number >= _as_number(number)

    def is_device_capability_family(self, number: int) -> bool:
        return self._number // 10 == number // 10

    @property
    def _number(self) -> int:
        return int(self.capability.major * 10 + self.capability.minor)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: False  # is_rocm, is_xpu, is_cpu and the like


def _as_number(capability: Any) -> int:
    return int(capability if isinstance(capability, int) else 10 * capability[0] + capability[1])


def _flash_attention(version: int, capability: tuple[int, int]) -> bool:
    """True if the flash-attn in vLLM's CUDA wheels has this version for this GPU."""
    major = capability[0]
    return {2: major >= 8, 3: major == 9, 4: major in (9, 10, 11)}.get(version, False)


def _vllm_config() -> Any:
    """Kimi's MLA shape, one of eight ranks, everything else as by default."""
    text = types.SimpleNamespace(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    model = types.SimpleNamespace(
        hf_text_config=text,
        is_hybrid=False,
        is_diffusion=False,
        is_mm_prefix_lm=False,
        rswa_window=None,
        get_num_attention_heads=lambda parallel: 8,
        get_num_kv_heads=lambda parallel: 8,
        get_head_size=lambda: 576,
    )
    return types.SimpleNamespace(
        model_config=model,
        cache_config=types.SimpleNamespace(cache_dtype="auto", block_size=16),
        parallel_config=types.SimpleNamespace(
            decode_context_parallel_size=1, cp_kv_cache_interleave_size=1
        ),
        attention_config=types.SimpleNamespace(
            flash_attn_version=None, use_non_causal=False, use_trtllm_attention=None
        ),
        speculative_config=None,
    )


class Release:
    """One release's own answers for GPUs of one compute capability.

    Args:
        root: the folder of its package ``vllm``.
        capability: for which the modules are imported anew, since some ask while they are.
    """

    def __init__(self, root: Path, capability: tuple[int, int]) -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] in ("torch", "vllm")]:
            del sys.modules[name]
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _Finder)]
        sys.meta_path.insert(0, _Finder(root))
        extensions: Any = importlib.import_module("typing_extensions")
        extensions.ParamSpec = typing.ParamSpec
        platforms: Any = importlib.import_module("vllm.platforms")
        platforms.current_platform = _Platform(types.SimpleNamespace(major=0, minor=0))
        config: Any = importlib.import_module("vllm.config")
        config.get_current_vllm_config = config.get_current_vllm_config_or_none = _vllm_config
        flash_attention: Any = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
        flash_attention.is_fa_version_supported = lambda v: _flash_attention(v, capability)
        specs: Any = importlib.import_module("vllm.v1.kv_cache_interface")
        specs.iter_layer_specs = lambda spec: [spec]
        for owner in (specs, importlib.import_module("vllm.utils.torch_utils")):
            owner.is_quantized_kv_cache = lambda dtype: dtype not in (None, *KV_DTYPES[:3])
        invariant: Any = importlib.import_module("vllm.model_executor.layers.batch_invariant")
        invariant.vllm_is_batch_invariant = lambda: False
        interface: Any = importlib.import_module("vllm.platforms.interface")
        self.capability = interface.DeviceCapability(*capability)
        platforms.current_platform.capability = self.capability
        flashinfer: Any = importlib.import_module("vllm.utils.flashinfer")
        flashinfer.has_nvidia_artifactory = lambda: True
        self.cuda: Any = importlib.import_module("vllm.platforms.cuda")
        self.registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
        self.torch: Any = importlib.import_module("torch")
        self.spec: Any = specs.AttentionSpec

    def table(self) -> dict[str, Any]:
        """Order and description of the back-ends that are tried on this GPU."""
        order = {
            kind: {kv: self.order(mla, kv) for kv in ("auto", "fp8")}
            for kind, mla in (("mla", True), ("other", False))
        }
        return {"order": order, "backends": {name: self.describe(name) for name in BACKENDS}}

    def order(self, mla: bool, kv_dtype: str) -> list[str]:
        """The dense back-ends that are tried for a layer, the first first."""
        decide = self.cuda._get_backend_priorities
        known = inspect.signature(decide.__wrapped__).parameters
        asked = {"num_heads": 8, "kv_cache_dtype": kv_dtype, "head_size": 576 if mla else 128}
        given = {name: value for name, value in asked.items() if name in known}
        return [b.name for b in decide(mla, self.capability, **given) if b.name in BACKENDS]

    def backend(self, name: str) -> Any:
        """The class of a back-end; None if this release has none of the name."""
        if name not in self.registry.AttentionBackendEnum.__members__:
            return None
        module, _, qualname = self.registry.AttentionBackendEnum[name].value.rpartition(".")
        return getattr(importlib.import_module(module), qualname)

    def describe(self, name: str) -> dict[str, Any] | None:
        """Everything that decides whether a back-end is taken, and what it then can do."""
        backend = self.backend(name)
        if backend is None:
            return None
        impl, builder = backend.get_impl_cls(), backend.get_builder_cls()
        interleaved = "supports_mtp_with_cp_non_trivial_interleave_size"
        described = {
            "mla": backend.is_mla(),
            "runs": backend.supports_compute_capability(self.capability),
            "dtypes": [d for d in DTYPES if backend.supports_dtype(getattr(self.torch, d))],
            "kv_cache_dtypes": [d for d in KV_DTYPES if backend.supports_kv_cache_dtype(d)],
            "head_sizes": [size for size in HEAD_SIZES if backend.supports_head_size(size)],
            "page_sizes": [size for size in PAGE_SIZES if backend.supports_block_size(size)],
            "combination": self._ask(backend, backend.supports_combination),
            "graphs": self._graphs(builder),
            "queries": getattr(getattr(builder, "query_len_support", None), "name", None),
            "dcp": bool(getattr(impl, "can_return_lse_for_decode", False)),
            "dcp_queries": takes_long_queries_with_dcp(builder),
            "dcp_interleaved": bool(getattr(impl, interleaved, False)),
        }
        self._compare(backend, described)
        return described

    def _ask(self, backend: Any, function: Any, **asked: Any) -> Any:
        given = {
            "head_size": 576 if backend.is_mla() else 128,
            "dtype": self.torch.bfloat16,
            "kv_cache_dtype": "auto",
            "block_size": None,
            "use_mla": backend.is_mla(),
            "has_sink": False,
            "use_sparse": False,
            "use_mm_prefix": False,
            "use_per_head_quant_scales": False,
            "attn_type": "decoder",
            "device_capability": self.capability,
            **asked,
        }
        known = inspect.signature(function).parameters
        return function(**{name: value for name, value in given.items() if name in known})

    def _compare(self, backend: Any, described: dict[str, Any]) -> None:
        """What the parts say must be what ``validate_configuration`` says of the whole."""
        for kv_dtype, page in itertools.product(KV_DTYPES, (None, *PAGE_SIZES)):
            reasons = self._ask(
                backend, backend.validate_configuration, kv_cache_dtype=kv_dtype, block_size=page
            )
            parts = (
                described["runs"]
                and kv_dtype in described["kv_cache_dtypes"]
                and (page is None or page in described["page_sizes"])
                and not described["combination"]
            )
            assert bool(parts) is not bool(reasons), (backend, kv_dtype, page, reasons)

    def _graphs(self, builder: Any) -> str:
        spec = type("Spec", (self.spec,), {"num_kv_heads": 8, "head_size": 128})()
        spec.kv_quant_mode = types.SimpleNamespace(is_nvfp4=False, is_per_token_head=False)
        spec.non_causal_multi_token_decode = False
        return str(builder.get_cudagraph_support(_vllm_config(), spec).name)


def text_of(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def takes_long_queries_with_dcp(builder: Any) -> bool:
    """True if the decode path takes several tokens a request with context parallelism, too.

    It is what the builder's ``__init__`` hands on as ``supports_dcp_with_varlen``.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(builder)))
    given = [
        keyword.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "supports_dcp_with_varlen"
    ]
    # Either True, or "while the ranks' shares are not interleaved", which is the default.
    return any(not (isinstance(v, ast.Constant) and v.value is False) for v in given)


def answers(root: Path) -> dict[str, Any]:
    """What a release says for each capability."""
    return {text_of(c): Release(root, c).table() for c in CAPABILITIES}


def gathered(releases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The table: for each thing its values by the first release that has them."""
    order: dict[str, Any] = {}
    backends: dict[str, Any] = {}
    for release, by_gpu in releases.items():
        for kind, kv in itertools.product(("mla", "other"), ("auto", "fp8")):
            now = merged({gpu: table["order"][kind][kv] for gpu, table in by_gpu.items()})
            changed(order.setdefault(kind, {}).setdefault(kv, {}), release, now)
        for name in BACKENDS:
            tables = {gpu: table["backends"][name] for gpu, table in by_gpu.items()}
            first = tables[text_of(CAPABILITIES[0])]
            described = first and {
                key: merged({gpu: table[key] for gpu, table in tables.items()}) for key in first
            }
            changed(backends.setdefault(name, {}), release, described)
    return {
        "capabilities": [text_of(c) for c in CAPABILITIES],
        "kv_cache_dtypes": list(KV_DTYPES),
        "head_sizes": list(HEAD_SIZES),
        "page_sizes": list(PAGE_SIZES),
        "order": order,
        "backends": backends,
    }


def merged(by_gpu: dict[str, Any]) -> Any:
    """One value where all GPUs have the same; otherwise ``{"on": ...}`` by capability."""
    values = list(by_gpu.values())
    return values[0] if all(value == values[0] for value in values) else {"on": by_gpu}


def changed(by_release: dict[str, Any], release: str, now: Any) -> None:
    if not by_release or next(reversed(by_release.values())) != now:
        by_release[release] = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sources", type=Path, required=True, help="folder with <release>/vllm")
    parser.add_argument("--only", help="print the answers of one release")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(answers(arguments.sources / arguments.only / "vllm")))
        return
    releases = {}
    for release in SUPPORTED:
        command = [sys.executable, __file__, "--sources", str(arguments.sources)]
        command += ["--only", release]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        releases[release] = json.loads(answer.stdout)
        print(release, flush=True)
    TABLE.write_text(json.dumps(gathered(releases), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
