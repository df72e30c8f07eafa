"""The page `/docs`, which shows the OpenAPI description with Swagger UI (https://github.com/swagger-api/swagger-ui).

The page loads nothing from other sites: the package `fastapi_offline` has Swagger UI's files, and `routes/ops.py`
serves them.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import fastapi_offline

SWAGGER_UI = Path(fastapi_offline.__file__).parent / "static"
"""The folder with Swagger UI's files."""

SCRIPT = (
    "SwaggerUIBundle({url: 'openapi.json', dom_id: '#page', deepLinking: true, tryItOutEnabled: true, "
    "defaultModelExpandDepth: 3})"
)
PAGE = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Wane: the API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
<div id="page"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>{SCRIPT}</script>
</html>
"""
DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; script-src 'self' 'sha256-{DIGEST}'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}
"""Response headers of the pages. They tell a browser to load nothing from other sites, to run no script but the page's
own, and never to show the page in a frame."""
