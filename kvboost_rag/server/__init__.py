"""An OpenAI-compatible server over one engine (extra `server`: FastAPI and uvicorn)."""
