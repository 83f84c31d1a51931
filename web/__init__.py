"""HTTP: OpenAI's endpoints over serving/engine.py. All that imports FastAPI is here."""
