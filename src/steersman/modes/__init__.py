"""The modes: each translates plans into kernel objects and programs them."""
