"""Each guard by itself: what it must tell apart, and what it must let pass."""

import pytest

from selfspec_cli.gateway.cache.guards import GUARDS, difference

DIFFERENT = {
    "numbers": [
        ("Boil 4 eggs", "Boil six eggs"),
        ("A loan of 5,000 at 3%", "A loan of 5,000 at 4%"),
        ("What is new in 3.11.7?", "What is new in 3.12.1?"),
        ("Two hundred fifty metres", "Two hundred sixty metres"),
    ],
    "units": [("Is 5 km far?", "Is 5 miles far?"), ("How many minutes is that?", "How many hours is that?")],
    "dates": [("Shops open on Monday", "Shops open on Tuesday"), ("3 March 2024", "3 April 2024")],
    "code": [("What does `==` do?", "What does `is` do?"), ("git reset --soft", "git reset --hard")],
    "asks": [("Who won at Hastings?", "When was Hastings?")],
    "negations": [
        ("Can dogs eat grapes?", "Why can dogs not eat grapes?"),
        ("A cake with eggs", "A cake without eggs"),
        ("Foods with sugar but not fat", "Foods with fat but not sugar"),
    ],
    "names": [("The capital of France", "The capital of Spain")],
    "opposites": [("The cheapest phone", "The most expensive phone"), ("Sort it ascending", "Sort it descending")],
    "directions": [
        ("Convert 5 km to miles", "Convert 5 miles to km"),
        ("What is 5 km in miles?", "How many km is 5 miles?"),
        ("Flights from Rome to Oslo", "Flights from Oslo to Rome"),
        ("A bus to the zoo", "A bus from the zoo"),
        ("Is iron heavier than lead?", "Is lead heavier than iron?"),
        ("Did Ali beat Frazier?", "Did Frazier beat Ali?"),
        ("Replace butter with olive oil", "Replace olive oil with butter"),
        ("Map port 80 to 90", "Map port 90 to 80"),
    ],
}
SAME = {
    "numbers": [
        ("Boil 4 eggs", "Boil four eggs"),
        ("250 m", "two hundred fifty m"),
        ("On 2024-03-03", "On 3 March 2024"),
    ],
    "units": [("5 km", "5 kilometres"), ("How long is it?", "How many minutes is it?")],
    "dates": [("3 March 2024", "2024-03-03"), ("On Mondays", "Every Monday"), ("May I go?", "Can I go?")],
    "code": [("Explain `a_b`", "What is `a_b` for?"), ("8 hard-boiled eggs", "8 eggs, boiled")],
    "asks": [("Who won?", "Which team won?")],
    "negations": [("I don't understand `is`", "Explain `is`"), ("Never do it", "Do not do it")],
    "names": [("The capital of France", "France: its capital?")],
    "opposites": [("The cheapest phone", "The most affordable phone"), ("at most 5", "under 5")],
    "directions": [
        ("Convert 5 km to miles", "How many miles is 5 km?"),
        ("Flights from Rome to Oslo", "Flights to Oslo from Rome"),
        ("The distance between Rome and Oslo", "The distance between Oslo and Rome"),
        ("On July 9", "On 9 July"),
    ],
}


@pytest.mark.parametrize(("guard", "a", "b"), [(guard, *pair) for guard, pairs in DIFFERENT.items() for pair in pairs])
def test_a_guard_tells_apart_either_way_round(guard, a, b):
    assert GUARDS[guard](a, b)
    assert GUARDS[guard](b, a)
    assert difference(a, b) is not None


@pytest.mark.parametrize(("guard", "a", "b"), [(guard, *pair) for guard, pairs in SAME.items() for pair in pairs])
def test_a_guard_lets_pass_either_way_round(guard, a, b):
    assert not GUARDS[guard](a, b)
    assert not GUARDS[guard](b, a)


def test_every_guard_is_tested():
    assert set(DIFFERENT) == set(SAME) == set(GUARDS)


@pytest.mark.parametrize(
    "text", ["", " ", "?", "'s", "°C", "5", "1:2:3", "`", "```", "-", "from", "from to", "than", "\x00é漢字"]
)
def test_no_text_is_too_odd(text):
    assert difference(text, text) is None
    difference(text, "from 5 km to Rome, not `x_y`")
