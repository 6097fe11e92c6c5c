"""Questions for chat models, of our own writing, asked through the model's own chat template.

A draft is only as good as it agrees with what the model itself says, so acceptance is measured on a model's own answers
to the kind of prompt that it is served with. The questions ask for an explanation, a list, a text, code or a
calculation, and for answers of some length: end-of-text is ignored while measuring, and what a model writes after it is
no answer.
"""

from __future__ import annotations

import random

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


APART = 16  # questions between the first of one seed and the first of the next


def chosen(count: int, seed: int) -> list[str]:
    """`count` of the questions, other ones for the next seed as far as there are others (48 in all)."""
    order = list(QUESTIONS)
    random.Random(0).shuffle(order)  # topics and tasks mixed
    return [order[(seed * APART + number) % len(order)] for number in range(count)]
