cuda = "12"
