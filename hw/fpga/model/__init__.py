"""What the engine computes, in numpy."""
