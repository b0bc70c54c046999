"""Videos and images on disk and from requests; previews, contact sheets, signatures and HTML pages."""
