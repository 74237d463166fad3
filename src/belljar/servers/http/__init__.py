"""`belljar serve`: one HTTP call that runs a program, over `engine.run`.

One process. uvicorn's event loop accepts, checks and answers (`listening`, `guard`, `app`); each
run blocks a thread of a pool (`runs`), because the engine does. Between the two stands a queue with
bounds (`admission`). A request's body becomes a Request under the operator's rights for remote
callers (`wire`, `servers.remote`); every error becomes problem JSON (`problems`).

A guest is killed when the connection of its request ends: uvicorn reports the end of the stream,
the run's task is cancelled, and the engine's own switch ends the guest.
"""
