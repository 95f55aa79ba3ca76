"""What sites run: each allows what its policy allows, on the data that it names itself."""

from fedgrad.federation.flower.stock import client_app

app = client_app()
