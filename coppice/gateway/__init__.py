"""The HTTP gateway: OpenAI's API in front of one or more orchestrators, in a process of its own."""
