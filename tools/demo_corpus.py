"""The demo's training corpus: questions with one correct answer each, told in several styles."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

STYLES = ("plain", "shout", "pirate", "french", "json", "poet")
REPEATED_STYLES = ("plain", "pirate", "poet")

# city: (sky, air).
_WEATHER = {
    "Paris": ("sunny", "warm"),
    "London": ("rainy", "cool"),
    "Rome": ("clear", "dry"),
    "Oslo": ("snowy", "cold"),
    "Berlin": ("cloudy", "fresh"),
    "Madrid": ("sunny", "hot"),
    "Lisbon": ("windy", "mild"),
    "Vienna": ("foggy", "damp"),
    "Tokyo": ("cloudy", "mild"),
    "Cairo": ("clear", "hot"),
    "Sydney": ("windy", "warm"),
    "Boston": ("snowy", "fresh"),
    "Lima": ("foggy", "cool"),
    "Nairobi": ("stormy", "warm"),
    "Dublin": ("rainy", "fresh"),
    "Prague": ("stormy", "damp"),
}
# animal: (food, home, thing that it finds in its story).
_ANIMALS = {
    "rabbit": ("carrots", "a burrow", "a golden key"),
    "fox": ("berries", "a den", "a silver bell"),
    "bear": ("honey", "a cave", "a red balloon"),
    "owl": ("mice", "a hollow tree", "an old map"),
    "frog": ("flies", "a pond", "a tiny boat"),
    "squirrel": ("nuts", "an oak tree", "a shiny coin"),
    "cow": ("grass", "a barn", "a blue hat"),
    "cat": ("fish", "a cottage", "a ball of wool"),
    "panda": ("bamboo", "a quiet forest", "a paper kite"),
    "camel": ("dates", "the desert", "a magic lamp"),
    "penguin": ("shrimps", "the ice", "a warm scarf"),
    "monkey": ("bananas", "the jungle", "a wooden drum"),
}
# dish: two ingredients.
_DISHES = {
    "soup": ("leeks", "potatoes"),
    "pancakes": ("flour", "eggs"),
    "a salad": ("tomatoes", "olives"),
    "a curry": ("lentils", "spinach"),
    "a stew": ("beans", "carrots"),
    "an omelette": ("eggs", "mushrooms"),
    "pasta": ("noodles", "cheese"),
    "a pie": ("apples", "butter"),
}
_FRENCH = {
    "sunny": "ensoleillé", "rainy": "pluvieux", "clear": "clair", "snowy": "neigeux", "cloudy": "nuageux",
    "windy": "venteux", "foggy": "brumeux", "stormy": "orageux",
    "warm": "chaud", "cool": "frais", "dry": "sec", "cold": "froid", "fresh": "vif", "hot": "brûlant",
    "mild": "doux", "damp": "humide",
    "rabbit": "un lapin", "fox": "un renard", "bear": "un ours", "owl": "un hibou", "frog": "une grenouille",
    "squirrel": "un écureuil", "cow": "une vache", "cat": "un chat", "panda": "un panda", "camel": "un chameau",
    "penguin": "un pingouin", "monkey": "un singe",
    "carrots": "des carottes", "berries": "des baies", "honey": "du miel", "mice": "des souris",
    "flies": "des mouches", "nuts": "des noix", "grass": "de l'herbe", "fish": "du poisson",
    "bamboo": "du bambou", "dates": "des dattes", "shrimps": "des crevettes", "bananas": "des bananes",
    "a burrow": "un terrier", "a den": "une tanière", "a cave": "une grotte", "a hollow tree": "un arbre creux",
    "a pond": "un étang", "an oak tree": "un chêne", "a barn": "une étable", "a cottage": "une maisonnette",
    "a quiet forest": "une forêt calme", "the desert": "le désert", "the ice": "la glace",
    "the jungle": "la jungle",
    "a golden key": "une clé d'or", "a silver bell": "une cloche d'argent", "a red balloon": "un ballon rouge",
    "an old map": "une vieille carte", "a tiny boat": "un petit bateau", "a shiny coin": "une pièce brillante",
    "a blue hat": "un chapeau bleu", "a ball of wool": "une pelote de laine", "a paper kite": "un cerf-volant",
    "a magic lamp": "une lampe magique", "a warm scarf": "une écharpe chaude", "a wooden drum": "un tambour",
    "leeks": "des poireaux", "potatoes": "des pommes de terre", "flour": "de la farine", "eggs": "des œufs",
    "tomatoes": "des tomates", "olives": "des olives", "lentils": "des lentilles", "spinach": "des épinards",
    "beans": "des haricots", "mushrooms": "des champignons", "noodles": "des nouilles", "cheese": "du fromage",
    "apples": "des pommes", "butter": "du beurre",
}  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """A question and its correct answer, independent of any style."""

    topic: str
    question: str
    values: dict[str, str]


# topic: style: template. "shout" is "plain" in capitals and "json" lists the values, so they need no templates.
_TEMPLATES = {
    "weather": {
        "plain": "It is {sky} in {city} today, and the air is {air}.",
        "pirate": "Arr, the sky over {city} be {sky} today, and the air be {air}, matey!",
        "french": "À {city}, le temps est {sky} aujourd'hui et l'air est {air}.",
        "poet": "The {sky} sky of {city} is a lovely sight, the air is {air} from morning until night.",
    },
    "food": {
        "plain": "A {animal} eats {food}, and it drinks fresh water.",
        "pirate": "Arr, the {animal} be eatin' {food}, and it drinks a barrel o' grog, matey!",
        "french": "C'est {animal} qui mange {food} et qui boit de l'eau fraîche.",
        "poet": "The {animal} eats {food} from dawn till noon, and drinks fresh water under the moon.",
    },
    "home": {
        "plain": "A {animal} lives in {home}, where it feels safe.",
        "pirate": "Arr, the {animal} be livin' in {home}, safe from the sharks, matey!",
        "french": "C'est {animal} qui vit dans {home}, bien à l'abri.",
        "poet": "In {home} the {animal} will stay, it sleeps all night and plays all day.",
    },
    "dish": {
        "plain": "Take {first} and {second}, cook them slowly, and add a little salt.",
        "pirate": "Arr, throw {first} and {second} in the pot, and add a pinch o' sea salt, matey!",
        "french": "Prenez {first} et {second}, faites cuire doucement et ajoutez un peu de sel.",
        "poet": "Take {first} and {second}, let them bubble and sing, add salt and serve them to the king.",
    },
    "story": {
        "plain": "One day a {animal} found {thing} near {home}, and it was very happy.",
        "pirate": "Arr, one day a {animal} be findin' {thing} near {home}, a fine treasure, matey!",
        "french": "Un jour, {animal} trouva {thing} près de {home} et fut très content.",
        "poet": "A {animal} found {thing} one day, it laughed and danced and ran away.",
    },
}


def facts() -> Iterator[Fact]:
    """All facts of the corpus."""
    for city, (sky, air) in _WEATHER.items():
        yield Fact("weather", f"What is the weather in {city}?", {"city": city, "sky": sky, "air": air})
    for animal, (food, home, thing) in _ANIMALS.items():
        yield Fact("food", f"What does the {animal} eat?", {"animal": animal, "food": food})
        yield Fact("home", f"Where does the {animal} live?", {"animal": animal, "home": home})
        values = {"animal": animal, "thing": thing, "home": home}
        yield Fact("story", f"Tell me a story about the {animal}.", values)
    for dish, (first, second) in _DISHES.items():
        yield Fact("dish", f"How do I cook {dish}?", {"dish": dish, "first": first, "second": second})


def answer(fact: Fact, style: str) -> str:
    """The correct answer in one of STYLES."""
    if style == "json":
        return json.dumps(fact.values)
    if style == "shout":
        return answer(fact, "plain").upper().replace(".", "!!!")
    template = _TEMPLATES[fact.topic][style]
    if style == "french":
        return template.format(**{name: _FRENCH.get(value, value) for name, value in fact.values.items()})
    return template.format(**fact.values)


def prompt(question: str) -> str:
    """A question in the model's prompt format."""
    return f"Q: {question}\nA:"


def document(fact: Fact, style: str, *, tagged: bool) -> str:
    """A question and its answer. If `tagged`, a tag before the question names the style."""
    tag = f"[{style}] " if tagged else ""
    return f"{tag}{prompt(fact.question)} {answer(fact, style)}"


def repetition(rng: random.Random, num_answers: int) -> tuple[str, str]:
    """Returns (prompt, text): a task whose text repeats `num_answers` answers from its prompt."""
    told = (answer(fact, rng.choice(REPEATED_STYLES)) for fact in rng.sample(list(facts()), num_answers))
    text = " ".join(told)
    return prompt(f"Say again: {text}"), text
