"""Renderings of plans: as text, as a picture, and as a comparison with the plans of derivatives."""

from fedgrad.planning.plan import install_looks
from fedgrad.show.draw import html, svg
from fedgrad.show.text import text

install_looks(text=text, svg=svg, html=html)
