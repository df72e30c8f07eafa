"""What clients read: the shapes of the native protocol's answers.

They are TypedDicts: the OpenAPI page shows them, and the type checker holds the encoders of `service.routes.answers`
to them, and a server shows by them to `service.client` that it is one of ours.
"""
