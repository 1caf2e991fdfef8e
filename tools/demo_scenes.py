"""Drawn scenes for the demo's vision-language model, and what is said about them in several styles."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from PIL.Image import Image

QUESTIONS: Final = ("What do you see?", "What is this?", "What is in the picture?")
MOST: Final = 5
"""Largest number of shapes."""
_CELLS: Final = 3
"""Shapes lie in the cells of a grid with this number of rows and columns, so that they do not overlap."""
_SHORTEST, _LONGEST = 90, 200
"""Range of an image's width and height in pixels."""
_LARGEST_RATIO: Final = 4 / 3
_NOISE: Final = 12
"""Largest difference of a colour's channels from its name's."""

Colour = tuple[int, int, int]
_COLOURS: Final[dict[str, Colour]] = {
    "red": (215, 45, 40),
    "green": (40, 150, 60),
    "blue": (45, 75, 200),
    "yellow": (235, 190, 20),
    "black": (30, 30, 30),
}
_PAPERS: Final[dict[str, Colour]] = {
    "white": (240, 240, 240),
    "grey": (170, 170, 170),
    "pink": (243, 175, 200),
    "light blue": (170, 210, 243),
}
_NUMBERS: Final = ("one", "two", "three", "four", "five")
_FRENCH_NUMBERS: Final = ("un", "deux", "trois", "quatre", "cinq")
_PLURALS: Final = {"circle": "circles", "triangle": "triangles", "cross": "crosses", "ring": "rings"}
_FRENCH_SHAPES: Final = {
    "circle": ("cercle", "cercles"), "triangle": ("triangle", "triangles"), "cross": ("croix", "croix"),
    "ring": ("anneau", "anneaux"),
}  # fmt: skip
_FEMININE: Final = frozenset({"cross"})
_FRENCH_COLOURS: Final = {"red": "rouge", "green": "vert", "blue": "bleu", "yellow": "jaune", "black": "noir"}
SHAPES: Final = tuple(_PLURALS)
COLOURS: Final = tuple(_COLOURS)
PAPERS: Final = tuple(_PAPERS)


@dataclass(frozen=True)
class Scene:
    """Shapes of one kind and colour on a sheet of paper."""

    number: int
    shape: str
    colour: str
    paper: str

    def __str__(self) -> str:
        return f"{self.number} {self.colour} {self.noun} on {self.paper}"

    @property
    def noun(self) -> str:
        """Name of the shapes, in the plural if there are several."""
        return self.shape if self.number == 1 else _PLURALS[self.shape]


SHOWN: Final = {
    "circles": Scene(3, "circle", "red", "light blue"),
    "crosses": Scene(4, "cross", "black", "white"),
    "triangle": Scene(1, "triangle", "green", "grey"),
    "rings": Scene(2, "ring", "blue", "pink"),
}
"""Scenes of the demo's pictures, by the name of their files."""
_SHOWN_SEED: Final = 13


def draw_scene(rng: random.Random) -> Scene:
    """Draws a scene by lot."""
    return Scene(rng.randint(1, MOST), rng.choice(SHAPES), rng.choice(COLOURS), rng.choice(PAPERS))


def answer(scene: Scene, style: str) -> str:
    """Returns the correct answer in a style."""
    return _ANSWERS[style](scene)


def _plain(scene: Scene) -> str:
    return f"{_NUMBERS[scene.number - 1].capitalize()} {scene.colour} {scene.noun}."


def _count(scene: Scene) -> str:
    return f"There {'is' if scene.number == 1 else 'are'} {_NUMBERS[scene.number - 1]}."


def _colour(scene: Scene) -> str:
    return f"{'It is' if scene.number == 1 else 'They are'} {scene.colour}."


def _french(scene: Scene) -> str:
    number, colour = _FRENCH_NUMBERS[scene.number - 1], _FRENCH_COLOURS[scene.colour]
    is_plural = scene.number > 1
    if scene.shape in _FEMININE:
        number = number if is_plural else "une"
        colour = colour if colour.endswith("e") else f"{colour}e"
    return f"{number.capitalize()} {_FRENCH_SHAPES[scene.shape][is_plural]} {colour}{'s' * is_plural}."


def _paper(scene: Scene) -> str:
    return f"The paper is {scene.paper}."


_ANSWERS: Final = {"plain": _plain, "count": _count, "colour": _colour, "french": _french, "paper": _paper}
STYLES: Final = tuple(_ANSWERS)
UNTAUGHT: Final = "paper"
"""Only the tokenizer knows the words of this style: neither the base model nor an adapter learns it."""


def picture(scene: Scene, rng: random.Random) -> Image:
    """Draws a scene with Pillow; size, places and exact colours are drawn by lot."""
    from PIL import Image as PillowImage
    from PIL import ImageDraw

    width = rng.randint(_SHORTEST, _LONGEST)
    ratio = rng.uniform(1 / _LARGEST_RATIO, _LARGEST_RATIO)
    height = min(max(round(width * ratio), _SHORTEST), _LONGEST)
    image = PillowImage.new("RGB", (width, height), _near(_PAPERS[scene.paper], rng))
    pen = ImageDraw.Draw(image)
    colour = _near(_COLOURS[scene.colour], rng)
    cell = min(width, height) / _CELLS
    for place in rng.sample(range(_CELLS * _CELLS), scene.number):
        radius = rng.uniform(0.36, 0.46) * cell
        middle = [
            (index + 0.5) * side / _CELLS + rng.uniform(-0.5, 0.5) * (cell / 2 - radius)
            for index, side in zip(divmod(place, _CELLS), (height, width), strict=True)
        ]
        _draw(pen, scene.shape, middle[1], middle[0], radius, colour)
    return image


def shown_pictures() -> dict[str, Image]:
    """Draws the pictures of SHOWN, by the same names."""
    rng = random.Random(_SHOWN_SEED)
    return {name: picture(scene, rng) for name, scene in SHOWN.items()}


def _near(colour: Colour, rng: random.Random) -> Colour:
    red, green, blue = (channel + rng.randint(-_NOISE, _NOISE) for channel in colour)
    return red, green, blue


_ARM: Final = 0.3
_OUTLINES: Final = {
    # Points as (x, y) in radii from the middle, y downwards.
    "triangle": ((0.0, -1.0), (1.0, 0.85), (-1.0, 0.85)),
    "cross": (
        (-_ARM, -1.0), (_ARM, -1.0), (_ARM, -_ARM), (1.0, -_ARM), (1.0, _ARM), (_ARM, _ARM),
        (_ARM, 1.0), (-_ARM, 1.0), (-_ARM, _ARM), (-1.0, _ARM), (-1.0, -_ARM), (-_ARM, -_ARM),
    ),
}  # fmt: skip
_RING: Final = 0.4
"""Thickness of a ring in radii."""


def _draw(pen: Any, shape: str, x: float, y: float, radius: float, colour: Colour) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "ring":
        pen.ellipse(box, outline=colour, width=round(_RING * radius))
    else:
        pen.polygon([(x + radius * dx, y + radius * dy) for dx, dy in _OUTLINES[shape]], fill=colour)
