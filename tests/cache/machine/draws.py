"""What the rules draw from: few chains with common beginnings, so that they meet."""

from hypothesis import strategies as st

from .model import SCOPES

tenants = st.sampled_from(sorted(SCOPES))
PATHS = ((0, 0, 0, 0, 0, 0), (0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 0, 0), (1, 1, 1, 1, 1, 1), (1, 0, 1, 0, 1, 0))
branches = st.tuples(st.sampled_from(PATHS), st.sampled_from([6, 6, 5, 3, 2, 1])).map(lambda cut: cut[0][: cut[1]])
namespaces = st.integers(0, 2)
picks = st.integers(0, 9)
# Jumps are whole multiples of 80 s and deadlines lie half-way: what a slow machine takes makes no difference.
ttls = st.sampled_from([40.0, 120.0, 520.0])
sessions = st.sampled_from(["", "", "a", "b"])
