"""Errors of adapters stay short, even if every layer has the problem."""

from __future__ import annotations

from adaptrt.formats.adapter.problems import join_problems


def test_problems_that_differ_in_the_layer_are_listed_once_with_their_count() -> None:
    problems = [f"module 'model.layers.{layer}.mlp.up_proj' has no lora_B" for layer in range(12)]
    problems.insert(3, "holds no tensors")
    assert join_problems(problems) == (
        "module 'model.layers.0.mlp.up_proj' has no lora_B (and for 11 other layers); holds no tensors"
    )


def test_experts_are_counted_too() -> None:
    problems = [
        f"module 'model.layers.{layer}.mlp.experts.{expert}.up_proj' has no lora_B"
        for layer in (0, 1)
        for expert in (5, 6)
    ]
    assert join_problems(problems) == (
        "module 'model.layers.0.mlp.experts.5.up_proj' has no lora_B (and for 3 other layers or experts)"
    )


def test_other_numbers_keep_problems_apart() -> None:
    problems = ["module 'layers.0.up': the rank is 8", "module 'layers.1.up': the rank is 4"]
    assert join_problems(problems) == "; ".join(problems)


def test_twenty_problems_are_listed_and_the_others_counted() -> None:
    problems = [f"tensor 'x{number}': is int8" for number in range(23)]
    assert join_problems(problems[:20]) == "; ".join(problems[:20])
    assert join_problems(problems) == "; ".join([*problems[:20], "problems that are not listed: 3"])
