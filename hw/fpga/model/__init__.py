"""What the engine computes, in numpy: its number format, the packing of weights for it, and a bit-exact model."""
