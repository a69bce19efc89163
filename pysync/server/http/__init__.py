"""HTTP: connections and their load, requests, responses and streams."""
