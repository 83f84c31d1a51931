"""HTTP: OpenAI's API, finetuning jobs and the page. All that imports FastAPI is here."""
