"""Writes the corpus of the tools env: short articles about Halvane, a fictional country of islands.

    python scripts/make_corpus.py palestra/environments/tools/data/corpus.jsonl

Names are chosen by hand and numbers are drawn at random, so that no model can know them; each fact is in one article.
An article's `facts` repeat words of its text exactly; tasks are made from them. The seed is fixed: the bytes are always
the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

TOWNS = (  # noqa: SIM905
    "Abbelmere Arnhollow Ashquill Bandry Birrowick Brackenmouth Brindlehay Cawdle Chalvern Corriden Crestholm "
    "Dammering "
    "Dellowby Dunmarrow Eastquay Eldervane Farrowgate Fennimoor Galdersea Gannetholm Glimmet Gorsefold Harrowmint "
    "Hestlebay Hollinsound Inverquill Jasperwick Kelldrum Kestervoe Lanternford Larkhythe Lowmarsk Marlstead Merrowin "
    "Mossgarth Netherquoy Norvandale Oatsby Orrinshaw Pellingstoke Penhavel Quillmere Ravelstoke Rookhallow Saltmarrow "
    "Sandervik Skerrigate Sorrelby Tamsworth Tidewell Thistlevoe Ullerwick Vellamore Vintersea Wainscombe Westermoor "
    "Windlethorpe Wrenfold Yarrowby Zellhaven"
).split()
FIRST = (  # noqa: SIM905
    "Alda Bram Cosima Dorrit Edvin Fenna Gorm Hesper Ilse Jory Kester Linnea Magnus Nerys Orla Petra Quentin Runa "
    "Silas "
    "Tove Ulric Vesna Wilmot Ysolde Anselm Bettine Corwin Delphine Emeric Freya"
).split()
LAST = (  # noqa: SIM905
    "Ackerveldt Brandvor Coldwater Dunnage Evensong Farthingale Grimsdyke Hartlepane Ironmantle Jessamy Kettlewick "
    "Lindqueller Marchbank Nettleship Oxbarrow Pennyfeather Quarrell Rushwater Silverlock Thornapple Underhay "
    "Vandermere "
    "Wexcombe Yellowlees Zandstrom Applegarth Birdwhistle Cloudsley Drinkwater Eaglesham"
).split()
RIVERS = "Arrel Brune Cassow Dremmel Ewin Fallow Garle Hesk Issel Kerrow Lodden Merle".split()  # noqa: SIM905
MOUNTAINS = (
    "Mount Ardle", "Bleakstone Tor", "Mount Corvel", "Devil's Anvil", "Mount Eskery", "Falconridge", "Grey Widow",
    "Mount Hallin", "Kingsmantle", "Mount Lorrey", "Ninefold Peak", "Old Sentinel", "Mount Questrel", "Whitecap Fell",
)  # fmt: skip
FESTIVALS = (
    "the Lantern Regatta", "the Night of Kites", "the Herring Parade", "the Feast of Bells", "the Amber Fair",
    "the Snow Choir", "the Barrel Race", "the Driftwood Biennial", "the Honey Assembly", "the Silent Market",
    "the Storm Concerts", "the Paper Fleet",
)  # fmt: skip
BRIDGES = (
    "Gull Bridge", "Tollkeeper's Bridge", "Copper Bridge", "Saint Orrin Bridge", "Weavers' Bridge", "Long Span",
    "Hesk Viaduct", "Merle Viaduct", "Ferryman's Bridge", "Iron Rainbow", "Candle Bridge", "Twelve Arches Bridge",
)  # fmt: skip
PRODUCTS = {
    "Arrowmint lantern": "a storm lantern", "Bellweather barometer": "a pocket barometer",
    "Brasscap flask": "a double-walled flask", "Cinderpot stove": "a travelling stove",
    "Cloudberry press": "a fruit press", "Corrigan compass": "a ship's compass", "Dovetail chair": "a folding chair",
    "Driftline reel": "a fishing reel", "Emberglass lamp": "a reading lamp", "Farsight glass": "a telescope",
    "Fieldmouse radio": "a wind-up radio", "Fogwhistle": "a harbour horn", "Gannet kettle": "a copper kettle",
    "Greyfriar clock": "a mantel clock", "Halfmoon saw": "a pruning saw", "Harbourmaster coat": "an oilskin coat",
    "Inkwell typewriter": "a portable typewriter", "Juniper loom": "a table loom", "Kittiwake sled": "a snow sled",
    "Lodestar sextant": "a sextant", "Marlin knife": "a rigging knife", "Millrace grinder": "a coffee grinder",
    "Nightjar bicycle": "a touring bicycle", "Otterskin coat": "a marsh coat", "Pebblecast pan": "an iron pan",
    "Quicksilver skate": "a racing skate", "Rainhouse tent": "a two-person tent", "Sandpiper oar": "an ash oar",
    "Skylark fiddle": "a fiddle", "Tidewatch": "a wristwatch that shows the tides", "Umberline easel": "a field easel",
    "Velvetback brush": "a clothes brush", "Wayfarer trunk": "a cabin trunk", "Yarrow accordion": "a button accordion",
}  # fmt: skip
WORKSHOPS = (
    "Ackle & Sons", "the Brindle Works", "Cooper's Yard", "Dunmore Brothers", "the Eastquay Foundry", "Finch & Farrow",
    "the Guild of Nine", "Hollis Instruments", "the Island Cooperative", "Kettering's", "Loom Street Makers",
    "the Northern Forge",
)  # fmt: skip
TRADES = (
    ("botanist", "described", "mosses and lichens"), ("painter", "left", "paintings"), ("engineer", "held", "patents"),
    ("composer", "wrote", "songs"), ("cartographer", "drew", "maps"), ("poet", "published", "poems"),
    ("astronomer", "catalogued", "variable stars"), ("shipwright", "built", "boats"),
)  # fmt: skip
KNOWN_FOR = (
    "smoked eel", "blue glass", "its rope walks", "sea-salt toffee", "bell casting", "a school of navigation",
    "barley beer", "its tarred wooden houses", "oyster beds", "weather-worn statues", "a floating library",
    "apple orchards", "kite making", "its covered market", "slate roofs", "a museum of knots",
)  # fmt: skip

Article = dict[str, Any]


def written(number: int) -> str:
    """A number with thousands separators: 48,211. Not used for years."""
    return f"{number:,}"


def town(rng: Random, name: str, river: str, mayor: str) -> Article:
    people = written(rng.randint(1_100, 97_000))
    facts = {"inhabitants": people, "founded": str(rng.randint(1040, 1790)), "mayor": mayor}
    text = rng.choice((
        "{name} is a town on the river {river} with {inhabitants} inhabitants. Settlers from the outer islands founded "
        "it in {founded}, and it received the right to hold a market not long after. The town is known for {known}. "
        "Its "
        "mayor is {mayor}.",
        "Founded in {founded}, {name} lies where the {river} leaves the hills. Visitors come for {known}. The last "
        "census "
        "counted {inhabitants} inhabitants. The council of {seats} members is led by the mayor, {mayor}.",
        "{name} stands on both banks of the {river}. {mayor} has been its mayor since the last election, and governs a "
        "population of {inhabitants} inhabitants. The oldest charter dates the town to {founded}. It is known for "
        "{known}.",
    ))  # fmt: skip
    return article(name, text, facts, river=river, known=rng.choice(KNOWN_FOR), seats=rng.randint(9, 41))


def person(rng: Random, name: str, birthplace: str, other: str) -> Article:
    trade, verb, works = rng.choice(TRADES)
    born = rng.randint(1702, 1931)
    facts = {"born": str(born), "birthplace": birthplace, "works": written(rng.randint(45, 4200))}
    text = rng.choice((
        "{name} was a {trade}, born in {birthplace} in {born}. In a long working life {name} {verb} {count} {works}, "
        "most "
        "of them in {other}.",
        "The {trade} {name} was born in {born}; the house in {birthplace} still stands. {name} {verb} {count} "
        "{works} and "
        "is buried in {other}.",
        "{name} ({trade}) {verb} {count} {works}, more than anybody else in Halvane at the time. A street in {other} "
        "bears the name. The year of birth was {born}, the place {birthplace}.",
    ))  # fmt: skip
    return article(name, text, facts, trade=trade, verb=verb, count=facts["works"], works=works, other=other)


def product(rng: Random, name: str, kind: str, place: str) -> Article:
    facts = {
        "price": written(rng.randint(12, 2900)),
        "weight": written(rng.randint(85, 9800)),
        "maker": rng.choice(WORKSHOPS),
    }
    text = rng.choice((
        "The {name} is {kind} made by {maker}. It costs {price} crowns and weighs {weight} grams. Repairs are done in "
        "{place}.",
        "{kind}, the {name} has been sold in {place} since {since}. Its price is {price} crowns, its weight {weight} "
        "grams, and its maker is {maker}.",
        "At a weight of {weight} grams the {name} is the best-known work of {maker}. The price of {kind} of this "
        "sort is "
        "fixed by law: {price} crowns. The workshop in {place} takes apprentices.",
    ))  # fmt: skip
    return article(name, text, facts, kind=kind, place=place, since=rng.randint(1820, 1960))


def river(rng: Random, name: str, mouth: str, source: str) -> Article:
    facts = {"length": written(rng.randint(31, 690)), "mouth": mouth, "ferries": written(rng.randint(24, 380))}
    text = (
        "The {short} is a river of {length} kilometres. It rises below {source} and reaches the sea at {mouth}. "
        "Between "
        "them {ferries} ferries carry people, carts and sheep from bank to bank."
    )
    return article(f"River {name}", text, facts, short=name, source=source)


def mountain(rng: Random, name: str, climber: str, place: str) -> Article:
    facts = {"height": written(rng.randint(640, 3900)), "climbed": str(rng.randint(1741, 1929)), "climber": climber}
    text = (
        "{name} is {height} metres high and can be seen from {place} on clear days. It was first climbed in "
        "{climbed} by "
        "{climber}, who went alone and left a tin box at the top."
    )
    return article(name, text, facts, place=place)


def festival(rng: Random, name: str, host: str, founder: str) -> Article:
    facts = {"visitors": written(rng.randint(2_300, 88_000)), "host": host, "first": str(rng.randint(1623, 1958))}
    text = (
        "{name} is held every year in {host}. It was held first in {first}, at the wish of {founder}. Last year it "
        "drew "
        "{visitors} visitors, and the town lent blankets to those who found no bed."
    )
    return article(name[4:], text, facts, said=name, founder=founder)


def bridge(rng: Random, name: str, place: str, architect: str) -> Article:
    facts = {"span": written(rng.randint(48, 1900)), "opened": str(rng.randint(1688, 1962)), "architect": architect}
    text = (
        "{name} near {place} is {span} metres long. {architect} drew the plans, and it was opened in {opened}. The "
        "toll "
        "for a cart is {toll} pence, and has never been raised."
    )
    return article(name, text, facts, place=place, toll=rng.randint(3, 60))


def article(title: str, text: str, facts: dict[str, str], **more: object) -> Article:
    named = {"name": more.pop("said", title), **facts, **more}
    sentence = text.format(**named)
    return {"title": title, "text": sentence[0].upper() + sentence[1:], "facts": facts}


def articles(rng: Random) -> Iterator[Article]:
    names = [f"{first} {LAST[(i + turn) % len(LAST)]}" for turn in (7, 16) for i, first in enumerate(FIRST)]
    people = rng.sample(names, 40)
    for name in TOWNS:
        yield town(rng, name, rng.choice(RIVERS), f"{rng.choice(FIRST)} {rng.choice(LAST)}")
    for name in people:
        birthplace, other = rng.sample(TOWNS, 2)
        yield person(rng, name, birthplace, other)
    for name, kind in PRODUCTS.items():
        yield product(rng, name, kind, rng.choice(TOWNS))
    for name in RIVERS:
        yield river(rng, name, rng.choice(TOWNS), rng.choice(MOUNTAINS))
    for name in MOUNTAINS:
        yield mountain(rng, name, rng.choice(people), rng.choice(TOWNS))
    for name in FESTIVALS:
        yield festival(rng, name, rng.choice(TOWNS), rng.choice(people))
    for name in BRIDGES:
        yield bridge(rng, name, rng.choice(TOWNS), rng.choice(people))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="the file to write; without it only the number is printed")
    parser.add_argument("--quick", action="store_true", help="a smoke test: writes no file")
    options = parser.parse_args()
    lines = [json.dumps(article, ensure_ascii=False) for article in articles(Random(6))]
    if options.out and not options.quick:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} articles")


if __name__ == "__main__":
    main()
