"""The dashboard's files: plain HTML, CSS and ECMAScript modules, served by `tierkv.service.routes.page` as they are."""
