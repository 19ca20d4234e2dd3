"""Templates of word problems: the text, the formula of the answer, and the constraints on the numbers.

A template begins with a line `difficulty | name | answer | number_rules`: for `a 2..90` a number is drawn, `t = q * b`
is computed (so that divisions leave no remainder), and `a > b` must hold. Only numbers that occur in the text identify
the problem; others only help to generate it.
"""

from __future__ import annotations

from typing import NamedTuple

NAMES, THINGS, BOXES, ANIMALS, WARES = (
    words.split()
    for words in (
        "Ada Ahmed Alice Amara Anna Ben Bruno Carla Chen Clara Daniel Dina Elena Emil Farid Fiona Grace Hana Hugo "
        "Ines Ivan Jamal Julia Kaito Kofi Lena Leo Lucia Malik Maria Mei Milan Nadia Nora Omar Oscar Paula Priya Rosa "
        "Sam Sara Tariq Theo Uma Vera Viktor Wanda Yara Yusuf Zoe",
        "apples balloons beads books bottles bricks buttons candles cards chestnuts coins cookies crayons cups eggs "
        "feathers figs flags flowers keys lemons marbles melons mugs nails nuts olives oranges pears pebbles pencils "
        "plates plums postcards potatoes ribbons screws shells spoons stamps stickers tiles tomatoes tulips walnuts",
        "bags barrels baskets boxes bowls buckets cartons chests crates drawers jars sacks trays tubs",
        "cows ducks geese goats horses llamas ponies rabbits sheep",
        "bicycle blanket camera carpet chair coat guitar jacket kettle lamp radio suitcase table tent watch",
    )
)

# Difficulty 1: one step. 2: two. 3: two or three, of different kinds. 4: parts, percentages, two unknowns. 5: opposing
# rates, and inverse problems.
TEMPLATE_TEXT = """
1 | given | a + b | a 2..90, b 2..90
{name} has {a} {things}. {other} gives {name} {b} more. How many {things} does {name} have now?

1 | gives | a - b | a 5..99, b 2..90, a > b
{name} has {a} {things} and gives {b} of them to {other}. How many {things} does {name} keep?

1 | rows | a * b | a 3..40, b 3..40
A hall has {a} rows of {b} seats. How many seats are there?

1 | packs | t // b | b 2..15, q 2..30, t = q * b
{name} packs {t} {things} into {boxes}, {b} into each. How many {boxes} does {name} fill?

1 | shares | t // b | b 2..15, q 2..30, t = q * b
{t} {things} are shared equally among {b} children. How many {things} does each child get?

1 | more | a - b | a 5..99, b 2..95, a > b
{name} has {a} {things}, {other} has {b}. How many more {things} does {name} have than {other}?

1 | needs | a - b | a 5..99, b 2..95, a > b
{name} needs {a} {things} and has {b} so far. How many {things} are still missing?

1 | bus | a - b | a 5..80, b 2..75, a > b
There are {a} people on a bus. At a stop {b} of them get off. How many people stay on the bus?

1 | tickets | a * b | a 3..60, b 2..25
One ticket costs {a} dollars. How many dollars do {b} tickets cost?

1 | pages | a - b | a 40..400, b 5..390, a > b
A book has {a} pages. {name} has read {b} of them. How many pages are left to read?

1 | older | a + b | a 4..60, b 2..35
{name} is {a} years old. {other} is {b} years older. How old is {other}?

1 | herd | a + b | a 3..90, b 2..90
{a} {animals} stand in a field and {b} more come in through the gate. How many {animals} are in the field now?

2 | loses | a + b - c | a 5..80, b 3..60, c 2..60, a + b > c
{name} has {a} {things}, buys {b} more and then loses {c}. How many {things} are left?

2 | besides | a * b + c | a 2..15, b 3..25, c 2..50
{name} has {a} {boxes} with {b} {things} in each, and {c} {things} besides. How many {things} does {name} have?

2 | change | n - a * b | a 2..12, b 2..15, c 1..40, n = a * b + c
{name} buys {a} {things} at {b} dollars each and pays with {n} dollars. How many dollars does {name} get back?

2 | and_a | a * b + c | a 2..15, b 2..15, c 10..90
{name} buys {a} {things} at {b} dollars each, and a {ware} for {c} dollars. How many dollars does {name} pay?

2 | bakes | (t - c) // b | b 2..12, q 2..15, c 2..20, t = q * b + c
{name} bakes {t} rolls, keeps {c} and shares the others equally among {b} friends. How many rolls does each friend
get?

2 | teams | (a + b) // c | a 5..60, c 2..12, q 3..25, b = c * q - a, b > 2
{a} girls and {b} boys form teams of {c}. How many teams are there?

2 | saves | a * b - c | a 3..30, b 3..20, c 5..200, a * b > c
{name} saves {a} dollars a week for {b} weeks and then spends {c} dollars. How many dollars are left?

2 | stops | a + b - c | a 20..200, b 3..60, c 3..90, a + b > c
A train leaves with {a} people. At the first stop {b} get on, at the second {c} get off. How many people are on the
train then?

2 | legs | 4 * a + 2 * b | a 2..60, b 2..80
A farm has {a} cows and {b} hens. How many legs do these animals have together?

2 | unread | n - a * b | a 5..40, b 2..14, c 10..200, n = a * b + c
{name} reads {a} pages a day of a book of {n} pages. How many pages are left after {b} days?

2 | cycles | 2 * a * b * c | a 2..20, b 2..6, c 2..10
{name} cycles {a} kilometres to work and the same way back, {b} days a week. How many kilometres is that in {c} weeks?

2 | times_old | a * b + c | a 3..20, b 2..4, c 2..20
{name} is {a} years old. {other} is {b} times as old. How old will {other} be in {c} years?

2 | fence | 2 * (a + b) | a 10..90, b 4..60, a > b
A rectangular garden is {a} metres long and {b} metres wide. How many metres of fence go once round it?

3 | three | a + a * b + a * b - c | a 5..40, b 2..5, c 2..60, a * b > c
{name} has {a} {things}. {other} has {b} times as many, and {third} has {c} fewer than {other}. How many {things} do
the three have together?

3 | machine | n // b * c | r 5..60, b 2..12, c 3..20, n = r * b, b != c
A machine makes {n} parts in {b} hours, always at the same rate. How many parts does it make in {c} hours?

3 | entry | a * c + b * d | a 8..30, b 2..15, c 2..30, d 2..40, a > b
Adults pay {a} dollars to get in, children {b} dollars. How many dollars do {c} adults and {d} children pay together?

3 | taps | n // (a + b) | a 3..30, b 3..30, q 4..40, n = (a + b) * q
Two taps fill an empty tank of {n} litres. One gives {a} litres a minute, the other {b}. After how many minutes is the
tank full?

3 | bags | (a * b - c) // d | a 4..20, b 8..30, d 4..12, q 5..60, c = a * b - d * q, c > 1, 30 > c
A baker bakes {a} trays of {b} rolls. {c} rolls are burnt; the others go into bags of {d}. How many bags does that
make?

3 | average | (a + b + c) // 3 | a 5..60, b 5..60, q 8..60, c = 3 * q - a - b, c > 3, 90 > c
{name} scores {a}, {b} and {c} points in three games. How many points is that a game, on average?

3 | half | n // 2 - b | h 20..300, b 5..200, n = 2 * h, h > b
{name} has {n} dollars, spends half of them on a {ware} and then {b} dollars on food. How many dollars are left?

3 | crates | a * b - c * d | a 4..30, b 10..40, c 3..25, d 10..40, a * b > c * d
A shop has {a} {boxes} of {b} apples each and {c} {boxes} of {d} pears each. How many more apples than pears does it
have?

3 | rope | (n - a * b) // c | a 2..12, b 2..12, c 2..12, q 2..20, n = a * b + c * q, b != c
From a rope of {n} metres {name} cuts {a} pieces of {b} metres. The rest is cut into pieces of {c} metres. How many
pieces of {c} metres does that make?

3 | carpet | a * b * c | a 4..15, b 3..12, c 8..40, a > b
Carpet costs {c} dollars a square metre. How many dollars does it cost to carpet a room that is {a} metres long and
{b} metres wide?

4 | reduced | n - n * p // 100 | k 2..40, j 1..18, n = 20 * k, p = 5 * j
A {ware} that cost {n} dollars is reduced by {p}%. How many dollars does it cost now?

4 | village | n + n * p // 100 - c | k 5..90, j 1..12, c 5..90, n = 20 * k, p = 5 * j
A village of {n} people grows by {p}%; then {c} people move away. How many people live there now?

4 | rest | n // a * (a - 1) // b * (b - 1) | a 2..8, b 2..8, k 2..20, n = a * b * k
{name} has {n} {things} and gives 1/{a} of them to {other} and then 1/{b} of the rest to {third}. How many {things}
does {name} keep?

4 | speed | (a * b + c * d) // (b + d) | a 40..160, b 2..6, c 40..160, d 2..6, (a * b + c * d) % (b + d) == 0, a != c
A train goes at {a} kilometres an hour for {b} hours and then at {c} kilometres an hour for {d} hours. What is its
average speed, in kilometres an hour, over the whole way?

4 | ratio | n // (a + b) * a | a 2..9, b 2..9, k 3..60, n = (a + b) * k, a != b
{name} and {other} share {n} dollars in the ratio {a} to {b}. How many dollars does {name} get?

4 | ages | (s - 2 * b - a) // 2 | x 4..50, a 2..30, b 2..20, s = 2 * x + a + 2 * b
{name} is {a} years older than {other}. In {b} years their ages will add up to {s}. How old is {other} now?

4 | heads | (l - 2 * h) // 2 | x 3..60, y 3..60, h = x + y, l = 4 * x + 2 * y
A farm has hens and cows: {h} heads and {l} legs in all. How many cows does it have?

4 | coins | (s - 5 * n) // 5 | x 2..60, y 2..60, n = x + y, s = 10 * x + 5 * y
{name} has {n} coins, each worth 5 or 10 cents, {s} cents in all. How many of them are worth 10 cents?

4 | painters | c + (n - (a + b) * c) // a | a 3..15, b 3..15, c 2..8, q 1..10, n = (a + b) * c + a * q
{name} paints {a} square metres an hour, {other} {b}. They begin a wall of {n} square metres together; after {c} hours
{other} leaves. How many hours does the whole wall take?

4 | profit | (a - c) * d - a * b | a 20..90, b 2..12, c 2..15, d 4..30, (a - c) * d > a * b
A trader buys {a} {things} at {b} dollars each. {c} of them get lost; the others are sold at {d} dollars each. How
many dollars does the trader gain?

5 | together | a * b // (a + b) | k 1..6, m 1..7, n 1..7, a = k * m * (m + n), b = k * n * (m + n), m != n
{name} alone takes {a} hours for a job, {other} alone {b} hours. How many hours do they take together?

5 | catches | a * b // (c - a) | a 30..90, b 2..6, c 40..160, c > a, a * b % (c - a) == 0
A lorry leaves a town at {a} kilometres an hour. {b} hours later a car follows it at {c} kilometres an hour. After how
many hours of driving does the car catch up?

5 | mixes | (a * p + b * q) // (a + b) | a 2..30, b 2..30, p 5..60, q 5..60, p != q, (a * p + b * q) % (a + b) == 0
{a} litres of a liquid with {p}% alcohol are mixed with {b} litres of one with {q}% alcohol. How many percent alcohol
does the mixture have?

5 | up_down | n * (100 + p) * (100 - q) // 10000 | k 1..30, i 1..9, j 1..9, n = 100 * k, p = 10 * i, q = 10 * j
The price of a {ware} is {n} dollars. It rises by {p}% and then falls by {q}%. How many dollars is it in the end?

5 | times_as_old | y * (n - 1) // (m - n) | x 3..15, n 2..6, q 1..8, m = n + q * (n - 1), y = x * q, 15 > m
{name} is {m} times as old as {other}. In {y} years {name} will be only {n} times as old as {other}. How old is
{other} now?

5 | joins | b * (n + 1) - a * n | n 3..20, a 10..80, b 8..85, a != b, b * (n + 1) > a * n
The average of {n} numbers is {a}. With one more number it becomes {b}. Which number was added?

5 | leaks | (n - c) // (a - b) | a 8..60, b 2..40, c 10..200, q 4..60, n = c + (a - b) * q, a > b
A tank holds {n} litres and has {c} litres in it. A pump adds {a} litres a minute while a leak loses {b} litres a
minute. After how many minutes is the tank full?

5 | sold | (s - b * n) // (a - b) | a 8..40, b 3..20, x 5..200, y 5..200, n = x + y, s = a * x + b * y, a > b
A theatre sells {n} tickets for {s} dollars in all: to adults at {a} dollars, to children at {b}. How many of the
tickets went to adults?

5 | hands | (n * (n - 1) - a * (a - 1)) // 2 | n 5..60, a 2..40, n > a + 1
{n} people meet, and {a} of them know each other already. Every two who do not know each other shake hands once;
nobody else does. How many handshakes is that?

5 | evens | (s - n * (n - 1)) // n | n 3..12, h 2..200, s = n * (2 * h) + n * (n - 1)
The sum of {n} consecutive even numbers is {s}. What is the smallest of them?

5 | meet | n // (a + b) * a | a 40..150, b 40..150, t 1..6, n = (a + b) * t, a != b
Two towns are {n} kilometres apart. At the same moment a train leaves each of them for the other, the first at {a}
kilometres an hour and the second at {b}. How many kilometres from the first town do they meet?

5 | free | (n - n // b) * a | a 10..90, b 3..9, n 4..60, n > b
A {ware} costs {a} dollars, but in every lot of {b} bought at once one is free. How many dollars do {n} of them cost,
bought at once?
"""


class WordTemplate(NamedTuple):
    """One template of word problems; `answer` is a Python expression of its numbers."""

    difficulty: int
    name: str
    answer: str
    number_rules: tuple[str, ...]
    text: str


def _story(paragraph: str) -> WordTemplate:
    head, *lines = paragraph.split("\n")
    difficulty, name, answer, numbers = head.split(" | ")
    return WordTemplate(int(difficulty), name, answer, tuple(numbers.split(", ")), " ".join(lines))


WORD_TEMPLATES = tuple(_story(paragraph) for paragraph in TEMPLATE_TEXT.strip().split("\n\n"))
