"""The engine's RTL as a program: what runs here is a simulator, whose cycles count and whose seconds do not."""
