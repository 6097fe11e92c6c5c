"""Questions for chat models, asked through the model's own chat template: general ones, coding tasks, edits of code,
questions about whole files.

A draft is good if it agrees with the model itself, so acceptance is measured on a model's own answers to the kind of
prompt that it serves. The questions ask for long answers, because end-of-text is ignored while measuring, and text
after it is no answer. General questions and coding tasks were written for this project. An edit asks for a function of
the held-out standard library with one change, so most of the answer repeats the prompt. A question about files follows
as much of the held-out standard library as the prompt has room for.
"""

from __future__ import annotations

import ast
import random
import textwrap
from collections.abc import Callable, Sequence
from functools import cache

from selfspec_cli.texts import library

QUESTIONS = (
    "Explain how a bicycle stays upright while it moves. Use at least three paragraphs.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "What are the main differences between a lake and a sea? Give several examples of each.",
    "Write a Python function that returns the longest word of a sentence, and explain each line.",
    "Describe how bread is made, step by step, from the flour to the finished loaf.",
    "A train leaves at 9:40 and arrives at 13:05 after two stops of ten minutes. How long did it move? Show steps.",
    "Give me ten ideas for a birthday party for a child who likes dinosaurs.",
    "Why is the sky blue during the day and red in the evening? Explain it to a teenager.",
    "Write a polite letter to a neighbour whose dog barks at night.",
    "Summarise the advantages and disadvantages of working from home for a small company.",
    "How does a refrigerator keep food cold? Describe its parts and what each of them does.",
    "Explain what a prime number is, and list all prime numbers below one hundred.",
    "Write a poem of four stanzas about the first snow of the winter.",
    "What should a person know before buying a used car? Make a detailed checklist.",
    "Compare the ways in which cats and dogs communicate with people.",
    "Write a short program that reads a file and counts how often each word occurs in it.",
    "Plan a weekend trip to a city that you like, with a schedule for each day.",
    "Explain how vaccines work, and why some of them have to be given more than once.",
    "Describe the life of a honey bee from the egg to its last day.",
    "How can I learn to play the guitar without a teacher? Suggest a plan for three months.",
    "Write the dialogue of a customer and a shopkeeper who disagree about a broken lamp.",
    "What causes earthquakes, and how do engineers build houses that withstand them?",
    "Explain the difference between weather and climate, with examples from different countries.",
    "I have 37 apples. I give away a third of them, rounded down, and eat two. How many are left? Explain each step.",
    "Write instructions for planting tomatoes on a balcony, for someone who has never grown anything.",
    "What is the purpose of a constitution? Describe what one usually contains.",
    "Tell the history of the printing press and what changed because of it.",
    "Explain what a database index is, when it helps, and when it does harm.",
    "Write an advertisement for a small hotel in the mountains.",
    "How do ships that are made of steel float? Explain it with an experiment that one can do at home.",
    "List fifteen useful phrases for a traveller, and explain when to use each of them.",
    "Describe the water cycle in detail, and say where people interfere with it.",
    "Write a review of an imaginary film about two rival chess players.",
    "What makes a good teacher? Give reasons and examples.",
    "Explain recursion to a beginner, with an example in Python and a picture in words.",
    "Describe how a letter travels from the sender to a person in another country.",
    "What are the most important rules for a healthy diet? Explain the reason for each rule.",
    "Write a speech of one minute for the opening of a new public library.",
    "How does a computer add two numbers? Begin with bits and end with the result.",
    "Compare solar and wind energy: cost, reliability, and where each of them fits best.",
    "Tell a fable about a fox and a heron, and end it with a moral.",
    "What happens in the human body during one night of sleep?",
    "Explain the rules of football to someone who has never seen a game.",
    "Write an e-mail to a colleague that explains why the project will be finished two weeks late.",
    "How are mountains formed, and why do some of them become smaller?",
    "Give advice to a student who is afraid of speaking in front of a class.",
    "Describe a market in the early morning: what one sees, hears and smells.",
    "Explain what inflation is, what causes it, and what a central bank does about it.",
)


CODING = (
    "Write a Python class for a least-recently-used cache with get, put and a limit on its size. Explain the design.",
    "Write a function in Python that parses an ISO 8601 date without using any library, with tests.",
    "Implement quicksort and merge sort in Python, and compare them in comments.",
    "Write a Python script that finds duplicate files in a folder by their hashes.",
    "Implement a binary search tree in Python with insert, delete, find and in-order traversal.",
    "Write a thread-safe queue with a maximum size in Python, using only locks and conditions.",
    "Write a function that evaluates arithmetic expressions with brackets and operator precedence.",
    "Implement Dijkstra's shortest path in Python for a graph given as a dictionary, with an example.",
    "Write a small HTTP server in Python that serves JSON from a dictionary, with GET, PUT and DELETE.",
    "Write a C function that reverses a linked list in place, and a main function that tests it.",
    "Implement a trie in Python with insertion, search and listing of all words with a prefix.",
    "Write a Python decorator that retries a function with exponential back-off, and show how to use it.",
    "Write an SQL schema for a library with books, members and loans, and five useful queries.",
    "Implement the game of life in Python with sets, and print ten generations of a glider.",
    "Write a JavaScript function that debounces another function, with an explanation and a test.",
    "Write a Python program that reads a CSV file and prints the mean and median of each numeric column.",
    "Implement a matrix class in Python with addition, multiplication, transposition and a determinant.",
    "Write a bash script that backs up a folder every day and keeps the last seven copies.",
    "Write a Python function that tokenizes and pretty-prints JSON without the json module.",
    "Implement a bank account in Java with deposits, withdrawals and a history, and unit tests.",
    "Write a Go program that downloads several pages at once with a limit on parallel requests.",
    "Implement a simple regular expression matcher with the dot and the star, by recursion, with tests.",
    "Write a Python class for polynomials with evaluation, addition, multiplication and derivative.",
    "Write a Rust function that counts words in a text and returns the ten most frequent ones.",
    "Implement topological sorting in Python, and raise an error that names the cycle if there is one.",
    "Write a command-line to-do list in Python with argparse that stores its items in a JSON file.",
    "Write a Python generator that yields prime numbers by an incremental sieve, and explain it.",
    "Implement a rate limiter with the token bucket algorithm in Python, with a test that fakes the clock.",
    "Write a TypeScript function that deep-compares two objects, and handle arrays, dates and maps.",
    "Implement an event emitter in Python with on, off, once and emit, with type annotations.",
    "Write a Python function that formats a table of dictionaries in aligned columns.",
    "Implement a heap-based priority queue in Python without heapq, with decrease-key.",
)

EDITS = (
    "Rename the function to `{name}_renamed` everywhere. Change nothing else.",
    "Add type annotations to all arguments and to the return value. Change nothing else.",
    "Write a docstring that documents the arguments and the return value, and change nothing else.",
    "Add a comment above each block that says what it does. Keep the code as it is.",
    "Add a keyword argument `verbose=False`, and print the result before returning when it is true.",
    "Insert a check at the beginning that raises TypeError when the first argument is None. Keep everything else.",
)
EDITED_LINES = (14, 36)  # length of an edited function: long enough to be work, short enough to be answered

ABOUT_FILES = (
    "Explain what the last class of these files is for, and how its methods work together.",
    "Name the functions of these files that a user of the module calls, each with one sentence on what it does.",
    "Write unit tests for one of the functions above.",
    "Which errors can the functions above raise, and when? Name the functions.",
    "Write a short tutorial for a user of this module, with examples of code.",
    "Choose one of the longer functions above, and write it again so that it is easier to read.",
    "Describe how data flows through these files, function by function.",
    "Write the docstrings that are missing in the code above.",
)

APART = 16  # questions between the first of one seed and the first of the next


def chosen(count: int, seed: int, kind: str = "chat") -> list[str]:
    """Return `count` questions of a kind of KINDS; the next seed has other questions, as long as there are any."""
    order = list(edits() if kind == "edits" else QUESTIONS if kind == "chat" else CODING)
    random.Random(0).shuffle(order)  # topics and tasks mixed
    return [order[(seed * APART + number) % len(order)] for number in range(count)]


KINDS = ("chat", "coding", "edits", "files")
"""Values of `workload.prompts` that mean questions."""


def no_template(name: str) -> str:
    return (
        f"model={name}: its tokenizer has no chat template, through which {', '.join(KINDS)} are asked; take "
        "workload.prompts=heldout, prose or random, or a file of text or of prompts, or name a tokenizer that has one: "
        "model.tokenizer=NAME"
    )


def asked(kind: str, count: int, seed: int, chat: Callable[[str], list[int]], most: int) -> list[list[int]]:
    """Return the token ids of `count` prompts of a kind of KINDS.

    chat: puts a question into the model's template and returns its token ids. most: length to which prompts about files
    are filled up, in tokens; other prompts keep their length.
    """
    if kind != "files":
        return [chat(question) for question in chosen(count, seed, kind)]
    whole = "\n".join(f"# ---- {name}\n{text}" for name, text in library.held_out_text())
    # Each prompt begins at another place, so that no two share a prefix; the text wraps around.
    starts = [(seed * APART + number * (len(whole) // count)) % len(whole) for number in range(count)]
    return [
        _about_files(whole[start:] + whole[:start], ABOUT_FILES[number % len(ABOUT_FILES)], chat, most)
        for number, start in enumerate(starts)
    ]


def _about_files(text: str, question: str, chat: Callable[[str], list[int]], most: int) -> list[int]:
    """Return the token ids of a question after as much of `text` as fits: 0.99 `most` to `most` tokens."""
    fitting, size = chat(question), 4 * most
    for _ in range(8):  # code has two to five characters a token, so a few corrections are enough
        ids = chat(f"Here are files of a library:\n\n```python\n{text[:size]}\n```\n\n{question}")
        fitting = ids if len(fitting) < len(ids) <= most else fitting
        if 0.99 * most <= len(ids) <= most:
            break
        size = int(size * 0.995 * most / len(ids))
    return fitting


@cache
def edits() -> Sequence[str]:
    """Return requests that each ask to change one function of the held-out standard library, with its source."""
    requests: list[str] = []
    low, high = EDITED_LINES
    for _, text in library.held_out_text():
        of_module = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or node.decorator_list:
                continue
            lines = of_module[node.lineno - 1 : node.end_lineno]
            if low <= len(lines) <= high:
                source = textwrap.dedent("\n".join(lines))
                task = EDITS[len(requests) % len(EDITS)].format(name=node.name)
                requests.append(
                    f"Here is a Python function:\n\n```python\n{source}\n```\n\n{task} Answer with the whole function."
                )
    return requests
