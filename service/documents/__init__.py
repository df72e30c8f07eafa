"""What clients read: the shapes of the native protocol's answers.

They are TypedDicts: the OpenAPI page shows them, and the type checker holds the encoders of `service.routes.answers`
to them.
"""
