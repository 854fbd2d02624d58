"""The pages in a real browser: headless Chromium, driven by Playwright.

`axe/` holds axe-core 4.14.1 from npm, whole and unchanged, under the Mozilla Public License 2.0.
"""
