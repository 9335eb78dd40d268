from overland.cli.main import main

main()
