"""Rules for files to leave out of wheels. Patterns match the path of a file in its wheel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """Rule to leave out files that match `pattern` (of fnmatch, where `*` crosses folders)."""

    pattern: str
    why: str


EVERYWHERE = (
    Rule("*.pyi", "types, read by checkers"),
    Rule("*/py.typed", "types, read by checkers"),
    Rule("*/tests/*", "tests"),
    Rule("*/locale/*", "translations"),
    Rule("*.dist-info/RECORD*", "written anew"),
)

# Keyed by the distribution's name, as in the file names of wheels.
OF_DISTRIBUTION = {
    "sglang": (
        Rule("sglang/srt/rust_extensions/*.so", "servers and image codecs in Rust, loaded on use"),
        # Built for torch 2.14: with 2.11 it takes int64 tensors for bytes and no model activates.
        # SGLang uses its Python implementation where the file is missing.
        Rule("sglang/srt/mem_cache/rust_tree_core/*.so", "a prefix tree built for torch 2.14"),
        Rule("sglang/multimodal_gen/*", "image and video generation"),
        Rule("sglang/test/*", "tests"),
        Rule("sglang/benchmark/*", "benchmarks"),
        Rule("sglang/kernels/jit/benchmark/*", "benchmarks"),
        Rule("sglang/kernels/jit/csrc/diffusion/*", "image and video generation"),
        Rule("*.md", "documentation"),
        Rule("*.hip", "kernels for AMD"),
        Rule("*.co", "kernels for AMD"),
    ),
    "apache_tvm_ffi": (Rule("*.a", "static library"),),
    "openai": (Rule("openai/cli/*", "a command line"),),
}


def rules_for(distribution: str) -> tuple[Rule, ...]:
    return EVERYWHERE + OF_DISTRIBUTION.get(distribution, ())
