"""Averaged weights as scripts have them, registered for checkpointing."""

from __future__ import annotations


class Averaged:
    def __init__(self, model):
        self.values = [parameter.detach().clone() for parameter in model.parameters()]
        self.updates = 0

    def update(self, model):
        self.updates += 1
        for value, parameter in zip(self.values, model.parameters(), strict=True):
            value.lerp_(parameter.detach(), 0.1)

    def state_dict(self):
        return {"values": self.values, "updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]
        for value, saved in zip(self.values, state["values"], strict=True):
            value.copy_(saved)
