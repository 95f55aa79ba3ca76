"""How plans look: as text, as a picture, and beside the plans of their derivatives."""

from fedgrad.planning.plan import install_looks
from fedgrad.show.draw import html, svg
from fedgrad.show.text import text

install_looks(text=text, svg=svg, html=html)
