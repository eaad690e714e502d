"""Write ``examples/data/chats_*.jsonl``: messages to a clinic, and what the desk writes into its book.

Everything is made up, from the lists below and a fixed seed: ``python examples/make_chats.py``. Owners of
held-out messages are in no message to learn from, nor are the sentences around them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"
SYSTEM = "Clinic book"
OWNERS = (
    "Abbot Adeyemi Amsel Baker Barros Becker Bello Brandt Calder Castro Cohen Costa Dalton Diallo Dorsey "
    "Eklund Ellis Farkas Fischer Flores Garcia Gupta Hansen Harper Hassan Holm Ibrahim Ivanov Jansen "
    "Jensen Kaur Keller Khan Kovac Larsen Lopez Lund Marsh Meyer Moreau Mwangi Nolan Novak Okafor Olsen "
    "Ortiz Patel Pereira Quinn Ramos Reyes Rossi Sato Schmidt Silva Sokolov Suzuki Tanaka Torres Usman "
    "Varga Vogel Walsh Weber Yilmaz Young "
)
TITLES = ["Mr", "Mrs", "Ms", "Dr"]
ANIMALS = {
    "dog": ["dog", "puppy", "beagle", "collie", "terrier", "spaniel"],
    "cat": ["cat", "kitten", "tabby", "tomcat"],
    "horse": ["horse", "mare", "pony", "foal"],
    "bird": ["parrot", "budgie", "canary"],
    "rabbit": ["rabbit", "bunny"],
}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]
HOURS = [f"{hour}:{minute}" for hour in (9, 10, 11, 14, 15, 16, 17) for minute in ("00", "15", "30", "45")]
REASONS = {
    "teeth": ["a broken tooth", "bad breath and sore gums", "a loose tooth"],
    "leg": ["a limp", "a swollen paw", "a sprained leg", "a lame foot"],
    "stomach": ["vomiting", "a sick stomach", "not eating for two days"],
    "skin": ["an itchy rash", "a bald patch", "scratching all night"],
    "eye": ["a red eye", "a runny eye"],
    "vaccination": ["a vaccination", "the yearly shots", "a rabies shot"],
}
LEARNED = [
    "Hello, this is {owner}. Can I bring my {animal} on {day} at {time}? It is for {reason}.",
    "{owner} here. My {animal} needs to see the vet: {reason}. {day}, {time}, please.",
    "Could you see my {animal} on {day}? {time} would suit me. The trouble is {reason}. Thanks, {owner}",
    "I need a visit for {reason}. It is a {animal}, and we could come {day} at {time}. My name is {owner}.",
    "Good morning, {owner} speaking. Is {time} free on {day}? My {animal} has to come in for {reason}.",
    "Please put down my {animal} for {day}, {time}. It is about {reason}. {owner}",
    "Hi! About {reason}: may I come with the {animal} at {time} on {day}? {owner}",
    "My {animal} should be looked at for {reason}. I am {owner}, and {day} at {time} is good for me.",
    "On {day} I can be there at {time} with my {animal}. Reason: {reason}. Regards, {owner}",
    "It is {owner} again. This time it is the {animal}, with {reason}. Have you got {time} on {day}?",
]
HELD_OUT = [
    "This is {owner}. I would like to come on {day} at {time} with my {animal}. The reason is {reason}.",
    "Is {day} at {time} possible? It is about {reason}, and the patient is my {animal}. Best wishes, {owner}",
    "{owner} on the phone. The {animal} has a problem, {reason}. Would {time} on {day} work for you?",
]


def chat(chance: random.Random, owners: list[str], sentences: list[str]) -> dict[str, list[dict[str, str]]]:
    """A message and the line in the book."""
    animal, reason = chance.choice(list(ANIMALS)), chance.choice(list(REASONS))
    owner, day = f"{chance.choice(TITLES)} {chance.choice(owners)}", chance.choice(DAYS)
    time = chance.choice(HOURS)
    asked = chance.choice(sentences).format(
        owner=owner,
        animal=chance.choice(ANIMALS[animal]),
        day=day,
        time=time,
        reason=chance.choice(REASONS[reason]),
    )
    asked = asked[0].upper() + asked[1:]
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": asked},
            {"role": "assistant", "content": f"{owner}; {animal}; {day}; {time}; {reason}"},
        ]
    }


def main() -> None:
    """Training and held-out chats."""
    chance = random.Random(1747)
    owners = OWNERS.split()
    chance.shuffle(owners)
    for name, count, some, sentences in (
        ("train", 320, owners[12:], LEARNED),
        ("heldout", 24, owners[:12], HELD_OUT),
    ):
        lines = "".join(json.dumps(chat(chance, some, sentences)) + "\n" for _ in range(count))
        (DATA / f"chats_{name}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
