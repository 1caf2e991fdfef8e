"""Pictures of the demo show what is said about them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from adaptrt.tools import demo_scenes as scenes
from adaptrt.tools.demo_scenes import Scene


@pytest.mark.parametrize(
    ("scene", "answers"),
    [
        (
            Scene(1, "cross", "green", "pink"),
            ("One green cross.", "There is one.", "It is green.", "Une croix verte.", "The paper is pink."),
        ),
        (
            Scene(1, "ring", "blue", "grey"),
            ("One blue ring.", "There is one.", "It is blue.", "Un anneau bleu.", "The paper is grey."),
        ),
        (
            Scene(2, "circle", "blue", "white"),
            ("Two blue circles.", "There are two.", "They are blue.", "Deux cercles bleus.", "The paper is white."),
        ),
        (
            Scene(5, "cross", "red", "light blue"),
            (
                "Five red crosses.",
                "There are five.",
                "They are red.",
                "Cinq croix rouges.",
                "The paper is light blue.",
            ),
        ),
    ],
)
def test_answers(scene: Scene, answers: tuple[str, ...]) -> None:
    assert scenes.STYLES == ("plain", "count", "colour", "french", "paper")
    assert tuple(scenes.answer(scene, style) for style in scenes.STYLES) == answers


def test_the_name_of_a_scene() -> None:
    assert str(Scene(1, "cross", "red", "grey")) == "1 red cross on grey"
    assert str(Scene(2, "cross", "red", "grey")) == "2 red crosses on grey"


def num_islands(mask: np.ndarray) -> int:
    """Number of groups of connected pixels."""
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)}
    found = 0
    while left:
        found += 1
        edge = [left.pop()]
        while edge:
            y, x = edge.pop()
            for near in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if near in left:
                    left.remove(near)
                    edge.append(near)
    return found


@pytest.mark.parametrize("shape", scenes.SHAPES)
@pytest.mark.parametrize("number", range(1, scenes.MOST + 1))
def test_a_picture_has_as_many_shapes(number: int, shape: str) -> None:
    rng = random.Random(number)
    image = scenes.picture(Scene(number, shape, "blue", "white"), rng)
    pixels = np.asarray(image).astype(int)
    paper = pixels[:, :, 0] > 150
    assert num_islands(~paper) == number
    # A colour is near its name's, and nothing else is drawn.
    assert (np.abs(pixels[paper] - 240) <= 12).all()
    assert (np.abs(pixels[~paper] - (45, 75, 200)) <= 12).all()
    assert 90 <= min(image.size) <= max(image.size) <= 200


def test_pictures_differ_by_seed_only() -> None:
    scene = Scene(3, "ring", "red", "white")
    first, again, other = (scenes.picture(scene, random.Random(seed)) for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes()
    assert (first.size, first.tobytes()) != (other.size, other.tobytes())


def test_all_scenes_are_drawn_by_lot() -> None:
    rng = random.Random(0)
    drawn = [scenes.draw_scene(rng) for _ in range(300)]
    assert {scene.number for scene in drawn} == set(range(1, scenes.MOST + 1))
    assert {scene.shape for scene in drawn} == set(scenes.SHAPES)
    assert {scene.colour for scene in drawn} == set(scenes.COLOURS)
    assert {scene.paper for scene in drawn} == set(scenes.PAPERS)
