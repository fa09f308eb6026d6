"""Questions whose answers are known, for measuring how sure a small local model is when it is right and when wrong.

Short ones are made here; sums in words and exam questions, their options cut to four, come from the router's data.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.router_data import read_rows

_CAPITALS = (
    "France:Paris Germany:Berlin Italy:Rome Spain:Madrid Japan:Tokyo China:Beijing Russia:Moscow Egypt:Cairo "
    "Canada:Ottawa Australia:Canberra Brazil:Brasilia Argentina:Buenos_Aires Chile:Santiago Peru:Lima Colombia:Bogota "
    "Mexico:Mexico_City Cuba:Havana Portugal:Lisbon Greece:Athens Turkey:Ankara Iran:Tehran Iraq:Baghdad India:Delhi "
    "Pakistan:Islamabad Thailand:Bangkok Vietnam:Hanoi Indonesia:Jakarta Philippines:Manila Kenya:Nairobi "
    "Ethiopia:Addis_Ababa Ghana:Accra Nigeria:Abuja Morocco:Rabat Austria:Vienna Hungary:Budapest Poland:Warsaw "
    "Finland:Helsinki Sweden:Stockholm Norway:Oslo Denmark:Copenhagen Ireland:Dublin Iceland:Reykjavik Ukraine:Kyiv "
    "Romania:Bucharest Bulgaria:Sofia Serbia:Belgrade Croatia:Zagreb Mongolia:Ulaanbaatar Nepal:Kathmandu Latvia:Riga"
)
_OPPOSITES = (
    "hot:cold big:small fast:slow happy:sad light:dark open:close early:late rich:poor strong:weak full:empty "
    "young:old wet:dry hard:soft up:down buy:sell win:lose love:hate day:night north:south true:false begin:end "
    "ancient:modern brave:cowardly scarce:abundant expand:contract victory:defeat transparent:opaque"
)
_FACTS = (
    ("What is the chemical symbol for {}?", "water:H2O gold:Au silver:Ag iron:Fe oxygen:O sodium:Na lead:Pb tin:Sn"),
    ("What is the plural of the word {}?", "child:children mouse:mice foot:feet goose:geese leaf:leaves ox:oxen"),
    ("What is the past tense of the verb {}?", "go:went eat:ate see:saw buy:bought bring:brought swim:swam fly:flew"),
    ("Who wrote {}?", "Hamlet:Shakespeare 1984:Orwell Emma:Austen Dracula:Stoker Ulysses:Joyce Faust:Goethe"),
    ("What is the French word for {}?", "dog:chien cat:chat house:maison water:eau bread:pain red:rouge friend:ami"),
    ("Which animal is called a {} when it is young?", "kitten:cat puppy:dog calf:cow foal:horse cub:bear tadpole:frog"),
    ("How many legs does a {} have?", "spider:8|eight ant:6|six dog:4|four crab:10|ten human:2|two snake:0|no|none"),
)


@dataclass(frozen=True, slots=True)
class Known:
    """A question and the pattern that a right answer has in it; is_last asks for the last number of the answer."""

    kind: str
    question: str
    right: str
    max_tokens: int
    is_last: bool = False

    def is_right(self, answer: str) -> bool:
        if not self.is_last:
            return re.search(self.right, answer, re.IGNORECASE) is not None
        numbers = re.findall(r"-?\d+(?:\.\d+)?", answer.replace(",", ""))
        return bool(numbers) and float(numbers[-1]) == float(self.right)


def short_questions() -> Iterator[Known]:
    rng = random.Random(7)
    for country, capital in _pairs(_CAPITALS):
        yield Known("fact", f"What is the capital of {country}?", rf"\b{capital}\b", 32)
    for word, other in _pairs(_OPPOSITES):
        yield Known("word", f"What is the opposite of the word {word}? Answer with one word.", rf"\b{other}", 32)
    for pattern, pairs in _FACTS:
        for what, answer in _pairs(pairs):
            yield Known("fact", pattern.format(what), rf"\b(?:{answer})\b", 32)
    for _ in range(40):
        a, b = rng.randrange(2, 60), rng.randrange(2, 60)
        yield Known("sum", f"What is {a} + {b}?", str(a + b), 40, is_last=True)
        yield Known(
            "sum", f"What is {a % 12 + 2} times {b % 12 + 2}?", str((a % 12 + 2) * (b % 12 + 2)), 40, is_last=True
        )


def long_questions(folder: Path, n_each: int) -> Iterator[Known]:
    """Take sums in words and exam questions from the data, the same ones each time."""
    rng = random.Random(11)
    for row in rng.sample(read_rows(folder, "zeroeval_gsm"), n_each):
        answer = row["answer"].lstrip("# ").replace(",", "")
        yield Known("sum in words", row["question"], answer, 200, is_last=True)
    exam = [r for r in read_rows(folder, "mmlu_pro") if r["src"].startswith("ori_mmlu") and len(r["question"]) < 300]
    for row in rng.sample(exam, 2 * n_each):
        options = json.loads(row["options"])
        right = options[ord(row["answer"]) - 65]
        shown = [right, *rng.sample([o for o in options if o != right], 3)] if len(options) > 3 else options
        rng.shuffle(shown)
        lines = "\n".join(f"{chr(65 + i)}. {option}" for i, option in enumerate(shown))
        letter = chr(65 + shown.index(right))
        pattern = (
            rf"^\W*(?:the (?:correct )?answer (?:is|would be)\W*)?(?:option )?\(?(?:{letter}\b|{re.escape(right)})"
        )
        yield Known("exam", f"{row['question']}\n{lines}\nAnswer with the letter of the right option.", pattern, 32)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for pair in text.split():
        what, _, answer = pair.partition(":")
        yield what, answer.replace("_", " ")
