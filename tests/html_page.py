"""A page taken apart, and words that must not get into one as they are."""

import html.parser

HOSTILE = "<script>window.hacked=1</script>\"'&<img src=x onerror=window.hacked=1>"


class Found(html.parser.HTMLParser):
    """The elements of a page, in order: (name, attributes, the text directly in it)."""

    VOID = ("meta", "input", "br")

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open = [], []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, name, attributes):
        self.elements.append([name, dict(attributes), ""])
        if name not in self.VOID:
            self.open.append(self.elements[-1])

    def handle_startendtag(self, name, attributes):
        self.elements.append([name, dict(attributes), ""])

    def handle_endtag(self, name):
        assert self.open and self.open[-1][0] == name, f"</{name}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.open[-1][2] += data

    def all(self, name=None, class_=None):
        return [
            e
            for e in self.elements
            if name in (None, e[0]) and (class_ is None or class_ in e[1].get("class", "").split())
        ]
