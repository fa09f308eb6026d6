"""Lines as hypothesis draws them."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.lossy_line import Noise

NOISES = st.builds(
    Noise,
    corrupt=st.floats(0, 0.02),
    drop=st.floats(0, 0.02),
    double=st.floats(0, 0.01),
    insert=st.floats(0, 0.01),
)
