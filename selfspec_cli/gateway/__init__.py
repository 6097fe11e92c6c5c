"""A gateway in front of OpenAI-compatible servers: it chooses a backend for each request, streams the answer through,
continues it elsewhere when that backend dies, and says what that gained.

Read in this order: server.py, core.py, routing.py (policies/), relay.py (upstream.py, continuation.py, client.py),
replica.py (timing.py), supervisor.py.
"""
