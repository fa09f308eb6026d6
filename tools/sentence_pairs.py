"""Sentences of which two and two mean the same, to compare models of sentences by. Written for that."""

from __future__ import annotations

PAIRS = (
    ("How do I reset my password?", "I forgot my login and want a new one."),
    ("The conveyor belt has stopped moving.", "The transport band stands still."),
    ("What will the weather be like tomorrow?", "Is it going to rain in the next day?"),
    ("A cat is sleeping on the sofa.", "The kitten naps on the couch."),
    ("The pump's pressure is too high.", "There is overpressure at the pump."),
    ("Please cancel my order.", "I do not want to buy this any more."),
    ("The stock market fell sharply today.", "Share prices dropped a lot this afternoon."),
    ("He plays the piano very well.", "He is an excellent pianist."),
    ("The robot arm missed the part.", "The manipulator failed to grip the workpiece."),
    ("Where can I find a good restaurant?", "Can you recommend a place to eat?"),
    ("The battery is almost empty.", "Little charge is left in the accumulator."),
    ("The train arrives at noon.", "The railway service gets in at twelve o'clock."),
    ("Solder bridges cause short circuits.", "Excess solder between pads shorts them."),
    ("She was born in Paris.", "Her birthplace is the capital of France."),
    ("The camera lens is dirty.", "There is dust on the optics."),
    ("Water boils at 100 degrees Celsius.", "At 212 Fahrenheit liquid water turns to steam."),
)
