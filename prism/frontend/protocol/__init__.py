"""Request bodies in OpenAI's shape, which the other APIs are converted to, and their reader."""
