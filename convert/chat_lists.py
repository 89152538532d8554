"""What the hand-written chat prompts are made of: templates, and what fills their slots.

A template's `{name}` takes an item of `SLOTS[name]`; `{a}` to `{d}` take whole numbers. Items of
`PLAIN` are whole prompts. One text a line, so that additions are easy to review.
"""

# ruff: noqa: E501

from __future__ import annotations


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


SLOTS: dict[str, tuple[str, ...]] = {
    "concept": _lines("""
        gravity
        photosynthesis
        inflation
        machine learning
        black holes
        the water cycle
        natural selection
        supply and demand
        blockchain
        plate tectonics
        the immune system
        quantum entanglement
        compound interest
        the greenhouse effect
        electricity
        DNA replication
        recursion
        encryption
        the stock market
        osmosis
        the theory of relativity
        nuclear fusion
        vaccines
        the Doppler effect
        democracy
        cognitive dissonance
        opportunity cost
        antibiotics resistance
        tides
        the carbon cycle
        neural networks
        the placebo effect
        entropy
        magnetism
        checks and balances
        cloud computing
        fermentation
        rainbows
        the food chain
        probability
        lightning
        the circulatory system
        APIs
        erosion
        game theory
        herd immunity
        version control
        the human eye
        confirmation bias
        metamorphosis
        relational databases
        the Big Bang
        buoyancy
        GPS
        monetary policy
    """),
    "event": _lines("""
        the French Revolution
        World War I
        the fall of the Roman Empire
        the moon landing
        the Industrial Revolution
        the Great Depression
        the Renaissance
        the Black Death
        the fall of the Berlin Wall
        the American Civil War
        the invention of the printing press
        the Cold War
        the Boston Tea Party
        the Silk Road
        the discovery of penicillin
        the sinking of the Titanic
        the women's suffrage movement
        the Cuban Missile Crisis
        the gold rush in California
        the signing of the Magna Carta
        the eruption of Mount Vesuvius
        the first Olympic Games
        the unification of Germany
        the building of the Great Wall of China
        the end of apartheid in South Africa
        the Space Race
        the Meiji Restoration
        the Irish potato famine
    """),
    "place": _lines("""
        Paris
        Tokyo
        Iceland
        New York City
        the Amazon rainforest
        Egypt
        Rome
        Thailand
        the Grand Canyon
        Kenya
        Lisbon
        Vancouver
        Morocco
        New Zealand
        Barcelona
        Istanbul
        Peru
        Sydney
        Scotland
        Vietnam
        Chicago
        Norway
        Mexico City
        the Greek islands
        Seoul
        Prague
        Costa Rica
        Berlin
        Hawaii
        India
    """),
    "food": _lines("""
        lasagna
        banana bread
        vegetable soup
        scrambled eggs
        chicken curry
        sushi
        pancakes
        a Caesar salad
        chocolate chip cookies
        pizza dough
        fried rice
        beef stew
        tacos
        hummus
        mashed potatoes
        apple pie
        pad thai
        an omelette
        sourdough bread
        lentil dal
        risotto
        guacamole
        a smoothie bowl
        roasted vegetables
        French toast
        ramen
        falafel
        tomato sauce
    """),
    "skill": _lines("""
        change a flat tire
        learn to play the guitar
        start a vegetable garden
        write a resume
        train a puppy
        save money on groceries
        tie a tie
        meditate
        take better photos with a phone
        prepare for a job interview
        learn a new language
        build a bookshelf
        start running
        remove a wine stain from a carpet
        set up a home Wi-Fi network
        give a good presentation
        knit a scarf
        improve my handwriting
        fix a leaky faucet
        study for final exams
        sell things online
        paint a bedroom
        back up my computer
        make new friends in a new city
        stop procrastinating
        do a proper push-up
        grow tomatoes on a balcony
        negotiate a higher salary
        swim freestyle
        read more books
        pack for a long trip
        start a podcast
        iron a shirt
        play chess
        organize a small closet
        write a thank you card
        sharpen a kitchen knife
        file my taxes
        juggle three balls
        compost at home
    """),
    "pair": _lines("""
        cats and dogs
        Python and JavaScript
        tea and coffee
        renting and buying a house
        viruses and bacteria
        capitalism and socialism
        running and swimming
        alligators and crocodiles
        a credit card and a debit card
        solar and wind power
        novels and short stories
        iPhones and Android phones
        butter and margarine
        public and private schools
        weather and climate
        electric cars and gas cars
        RAM and a hard drive
        a lawyer and a judge
        frogs and toads
        working from home and working in an office
        mitosis and meiosis
        jazz and blues
        SQL and NoSQL databases
        baking soda and baking powder
        stocks and bonds
        the violin and the viola
        oil paint and watercolor
        a comet and an asteroid
        brown rice and white rice
        moths and butterflies
        a simile and a metaphor
        yoga and pilates
        HTTP and HTTPS
        the Roman and Greek gods
        speed and velocity
        empathy and sympathy
    """),
    "animal": _lines("""
        octopuses
        elephants
        honey bees
        penguins
        blue whales
        owls
        dolphins
        wolves
        monarch butterflies
        polar bears
        ants
        giraffes
        sharks
        hummingbirds
        kangaroos
        bats
        sea turtles
        chameleons
        red pandas
        salmon
        hedgehogs
        camels
        squirrels
        jellyfish
    """),
    "hero": _lines("""
        a lonely lighthouse keeper
        a dragon who is afraid of fire
        two sisters who find a secret door
        a robot that learns to paint
        a young wizard on her first day of school
        an old fisherman
        a detective who lost his memory
        a cat that can talk
        a boy who collects clouds
        an astronaut stranded on Mars
        a baker with a magical oven
        a shy girl who joins the school band
        a time traveler stuck in 1920
        a knight without a horse
        a family moving to a new country
        a dog who wants to be mayor
        a nurse working the night shift
        a librarian who discovers a map
        twin brothers who swap places
        a tree that grants wishes
        a taxi driver in a rainy city
        a ghost who misses breakfast
        a pirate who gets seasick
        a scientist who shrinks herself
        a street musician
        a grandmother who was once a spy
    """),
    "mood": _lines("""
        autumn leaves
        the ocean at night
        losing a friend
        the first day of spring
        coffee in the morning
        a broken clock
        my mother's garden
        growing old
        the city in the rain
        a summer thunderstorm
        hope
        snow falling on a quiet street
        falling in love
        the stars
        home
        an empty train station
        courage
        the smell of books
        a river
        childhood memories
        silence
        a candle
        missing someone far away
        the desert
        a new beginning
    """),
    "mail": _lines("""
        my boss to ask for a day off
        a landlord about a broken heater
        a customer whose order arrived late
        a professor asking for an extension
        my team to announce a meeting on Friday
        a friend to invite her to my birthday party
        a company to apply for an internship
        a hotel to change my booking
        a colleague to thank him for his help
        my neighbor about loud music
        a client to follow up on an unpaid invoice
        HR to ask about health insurance
        a school to ask about enrolling my daughter
        a restaurant to reserve a table for twelve
        an old friend I haven't seen in ten years
        customer support about a refund
        a recruiter to decline a job offer
        my gym to cancel my membership
        parents about the school field trip
        the city council about a pothole
        a coworker to congratulate her on a promotion
        a speaker to invite him to our conference
        our suppliers about a price change
        my bank about a charge I don't recognize
        volunteers to thank them for the charity run
        my manager to resign
    """),
    "pycode": _lines("""
        reverses a string
        checks whether a number is prime
        finds the largest number in a list
        counts the vowels in a sentence
        computes the factorial of a number
        removes duplicates from a list
        checks if a word is a palindrome
        converts Celsius to Fahrenheit
        merges two sorted lists
        counts how often each word appears in a text
        returns the nth Fibonacci number
        sorts a list of dictionaries by a key
        reads a CSV file and prints the average of a column
        validates an email address
        flattens a nested list
        finds the second largest element of a list
        generates a random password
        computes the greatest common divisor of two numbers
        checks if two strings are anagrams
        implements binary search
        transposes a matrix
        sums the digits of an integer
        downloads a web page and prints its title
        converts a Roman numeral to an integer
        finds all files with a given extension in a folder
        groups a list of words by their first letter
        implements a simple stack class
        calculates the number of days between two dates
    """),
    "query": _lines("""
        all customers who live in Berlin
        the ten most expensive products
        the number of orders per customer
        the average salary in each department
        employees hired after 2020
        the total sales for each month
        products that were never ordered
        students with a grade above 90
        the second highest salary
        users who have not logged in for 30 days
        books written by authors from Japan
        the names of all managers and how many people they manage
        duplicate email addresses
        the top 5 cities by number of customers
        orders with a total of more than 500 dollars
        movies released between 1990 and 1999
        the oldest patient in each hospital
        flights that were delayed by more than two hours
        customers who bought both coffee and tea
        the percentage of orders that were returned
    """),
    "broken": _lines("""
        She don't like to going at the beach.
        me and him was walking to school when it start raining
        Their are to many people in this room.
        I has been working here since five years.
        The informations you gave me was very useful.
        He runned faster then his brother yesterday.
        we was suppose to meet at the libary on tuesday
        If I would have known, I will have come earlier.
        The childrens plays in the park every days.
        Its a beautiful day, isnt it
        I am agree with you about this topic.
        She said me that she will comes tomorrow.
        Does anyone knows where is my keys?
        the dog wagged it's tail and barked loud
        I look forward to hear from you soon.
        Yesterday I go to the store and buyed some milk.
        He is more taller than his father.
        There is many reasons why people moves to cities.
        My sister she is a doctor and work in hospital.
        I could of finished the project if I have more time.
        Neither of the answers are correct, i think.
        Please explain me how does this works.
        Him and I has went to the same school.
        the results was affected from the bad weather
    """),
    "paragraph": _lines("""
        The honey bee is one of the most important pollinators in the world. A single colony can visit millions of flowers in a day. In recent years, however, bee populations have fallen because of pesticides, disease and the loss of wild flowers. Farmers and gardeners can help by planting flowers that bloom at different times of the year.
        Last Tuesday the town council voted to close Main Street to cars on weekends. Shop owners are divided: some expect more visitors on foot, others fear that customers who drive will stay away. The trial will last six months, after which the council will review the results.
        Coffee was first grown in Ethiopia and later traded through the port of Mocha in Yemen. By the 16th century it had reached Persia, Egypt and Turkey. Coffee houses became places where people met to talk, listen to music and play chess. Today it is one of the most traded goods in the world.
        Our company grew by 12 percent in the second quarter, mostly thanks to strong demand in Asia. Costs rose as well, because shipping became more expensive. We plan to open two new offices next year and to hire about forty engineers.
        Sleep is essential for memory. During deep sleep the brain replays the events of the day and moves them into long-term storage. People who sleep fewer than six hours tend to forget more and make more mistakes. Even a short nap can help.
        The old bridge over the river was built in 1887 by a local engineer. It survived two floods and a fire, but in 2010 inspectors found cracks in its pillars. After a long debate the city decided to repair it instead of building a new one.
        Remote work has changed how teams communicate. Many meetings have moved to video calls, and written messages have replaced quick chats in the hallway. Some employees enjoy the flexibility, while others feel isolated. Experts suggest a mix of both.
        Glaciers are rivers of ice that move slowly under their own weight. They shape valleys, carry rocks and store most of the fresh water on Earth. As temperatures rise, many glaciers are shrinking, which raises the level of the sea.
        Maria started her bakery with a single oven and a loan from her uncle. For the first year she worked sixteen hours a day. Word of her rye bread spread quickly, and today she runs five shops and employs thirty people.
        The study followed 2,000 adults for ten years. Those who walked at least thirty minutes a day had a lower risk of heart disease than those who did not. The researchers warn that the study cannot prove that walking was the cause.
        Chess is thought to have come from India in the 6th century. It spread to Persia and then to Europe, where the rules changed: the queen became the strongest piece on the board. Computers have beaten the best human players since 1997.
        The library will be closed from Monday to Thursday while new shelves are put in. Books can be returned at the town hall during this time. The reading club will meet in the café across the street, and the children's hour is cancelled.
        Electric buses are quieter and cleaner than diesel ones, but they cost more to buy. Cities that have switched report lower costs for fuel and repairs. The largest problem is charging: a depot for a hundred buses needs as much power as a small town.
        When the storm hit the coast, most families had already left. Volunteers opened the school gym as a shelter and cooked soup for two hundred people. By morning the water had gone down, and the cleaning began.
    """),
    "sentence": _lines("""
        Where is the nearest train station?
        I would like a cup of coffee, please.
        The weather is beautiful today.
        My brother lives in a small village near the mountains.
        How much does this cost?
        She has been learning to cook for two years.
        We are going to the beach tomorrow.
        Can you help me find my passport?
        The book on the table is mine.
        I am sorry for being late.
        What time does the museum open?
        Happy birthday to my best friend!
        There is a problem with my room.
        He always reads the newspaper in the morning.
        Thank you very much for your kindness.
        The children are playing in the garden.
        Could you speak more slowly?
        I lost my phone on the bus yesterday.
    """),
    "language": _lines("""
        French
        Spanish
        German
        Italian
        Portuguese
        Dutch
        Latin
        Swedish
    """),
    "word": _lines("""
        ubiquitous
        serendipity
        ephemeral
        pragmatic
        resilience
        ambiguous
        altruism
        nostalgia
        meticulous
        paradox
        empathy
        frugal
        candid
        benevolent
        hypothesis
        sovereignty
        irony
        catalyst
        procrastinate
        euphemism
        integrity
        lucid
        tenacious
        zeitgeist
        plausible
        verbose
        stoic
        dilemma
        anachronism
        placid
    """),
    "product": _lines("""
        a reusable water bottle
        noise cancelling headphones
        an online math course
        a vegan bakery
        a dog walking app
        a smart alarm clock
        handmade candles
        a used bookstore
        an electric bike
        a meal planning service
        a yoga studio
        a children's museum
        a budget travel blog
        a solar phone charger
        organic baby food
        a mobile car wash
        a plant subscription box
        a coworking space
        a language learning game
        an ergonomic office chair
        a local hiking club
        a board game cafe
    """),
    "issue": _lines("""
        I can't fall asleep at night
        my back hurts after sitting all day
        I feel nervous before exams
        I get headaches in the afternoon
        my eyes are tired from the screen
        I eat too much sugar
        I feel tired even after eight hours of sleep
        I argue with my roommate about cleaning
        I have a fear of public speaking
        my teenage son never talks to me
        I feel lonely since I moved
        I keep forgetting people's names
        I want to lose ten pounds
        I spend too much time on my phone
        my skin is very dry in winter
        I have a cold and a sore throat
        I get sunburned easily
        I can't concentrate at work
        my knees hurt when I run
        I worry about money all the time
        I had a fight with my best friend
        I twisted my ankle
        I'm burned out from my job
        my baby wakes up every two hours
    """),
    "role": _lines("""
        a pirate captain
        a strict but fair teacher
        a medieval blacksmith
        a travel agent
        Sherlock Holmes
        a friendly barista
        a job interviewer
        a wise old monk
        an alien visiting Earth for the first time
        a sports commentator
        a museum guide
        a stand-up comedian
        Albert Einstein
        a fairy godmother
        a personal trainer
        a ship's cook
        a news anchor
        a talking houseplant
        a Roman soldier
        a librarian
        Shakespeare
        a grumpy cat
    """),
    "job": _lines("""
        nurse
        software engineer
        high school teacher
        accountant
        graphic designer
        chef
        electrician
        data analyst
        journalist
        pilot
        marketing manager
        veterinarian
        librarian
        project manager
        architect
        social worker
        pharmacist
        firefighter
        translator
        marine biologist
        real estate agent
        civil engineer
    """),
    "fact": _lines("""
        capital of Australia
        largest planet in the solar system
        author of Pride and Prejudice
        chemical symbol for gold
        longest river in the world
        currency of Japan
        smallest country in the world
        boiling point of water in Fahrenheit
        tallest mountain on Earth
        first president of the United States
        square root of 144
        hardest natural substance
        national language of Brazil
        speed of light
        capital of Canada
        painter of the Mona Lisa
        largest ocean
        main ingredient of guacamole
        number of bones in the human body
        inventor of the telephone
        fastest land animal
        closest star to Earth
        atomic number of carbon
        capital of Kenya
        largest desert in the world
        freezing point of water in Celsius
        composer of the Four Seasons
        official language of Egypt
        biggest organ of the human body
        plural of cactus
    """),
    "why": _lines("""
        is the sky blue
        do we dream
        do cats purr
        does ice float on water
        do leaves change color in the fall
        do onions make us cry
        is the ocean salty
        do we yawn
        does bread rise
        do we have leap years
        do stars twinkle
        does metal feel colder than wood
        do people get goosebumps
        does the moon change shape
        do birds migrate
        does popcorn pop
        is Venus hotter than Mercury
        do our fingers wrinkle in water
        do planes leave white trails
        does soap clean things
        do bees make honey
        is blood red
    """),
    "plan": _lines("""
        a birthday party for a 7 year old
        a weekend hiking trip
        a small wedding in a garden
        a study schedule for two weeks of exams
        a surprise party for my parents' anniversary
        a family reunion
        a one month workout program for a beginner
        a weekly meal plan on a small budget
        a charity bake sale
        a road trip along the coast
        a first date
        a move to another city
        a company picnic
        a book club meeting
        a science fair at school
        a camping trip with kids
        a home office makeover
        a baby shower
        a garage sale
        a movie night for teenagers
        a daily routine for someone who works nights
        a three day fishing trip
    """),
    "review": _lines("""
        The battery died after two days and nobody answered my emails.
        Absolutely loved it, the staff were friendly and the food came quickly.
        It works as described, nothing special.
        I waited an hour and the soup was cold. Never again.
        Great value for the price, my kids play with it every day.
        The plot was slow, but the acting was wonderful.
        Delivery was fast but the box was damaged.
        This is the best pair of shoes I have ever owned!
        The room was clean, though a bit noisy at night.
        The app keeps crashing since the last update.
        Meh. I expected more from this author.
        What a concert! I still have goosebumps.
        The instructions are impossible to follow.
        Comfortable, light, and it looks good too.
        My order was wrong twice in a row.
        A decent phone, but the camera is poor in low light.
        The teacher explains everything clearly and with patience.
        It broke the first time I used it.
    """),
    "stiff": _lines("""
        We regret to inform you that your application has not been successful.
        The meeting was not very good because nobody had prepared anything.
        Hey, can you get me that report ASAP? I need it now.
        Due to unforeseen circumstances, the event has been postponed until further notice.
        The food was good and the place was nice and the people were nice.
        I think that maybe we could possibly try to change the schedule a little bit.
        You forgot to send the file again.
        It is imperative that all personnel utilize the designated entrance.
        The movie was about a man who goes on a trip and then he learns things.
        Our product is the best and everyone should buy it.
        gonna be late, traffic is crazy, start without me
        The experiment was done by the students and the results were written down by them.
        I am writing to you with regard to the matter of the keys that I have lost.
        Don't park here or your car will be towed.
        She was very, very tired after the very long day.
        The new rules are bad and I don't like them.
    """),
    "list_of": _lines("""
        healthy snacks for work
        indoor plants that need little light
        classic novels everyone should read
        names for a black cat
        ways to reduce plastic waste
        questions to ask on a first date
        renewable energy sources
        good habits for students
        icebreaker games for a new team
        gifts for a grandfather
        famous female scientists
        movies for a rainy day
        ideas for a science project
        musical instruments with strings
        breakfast foods with a lot of protein
        ways to say thank you
        European countries that begin with the letter S
        stretches for runners
        board games for two players
        names for a coffee shop
        common cognitive biases
        things to bring to the beach
        rhyming words for "light"
        programming languages and what they are used for
        safety rules for a chemistry lab
        reasons to learn history
        household items that can be recycled
        uses for old newspapers
        careers for people who love animals
        inventions that changed the world
    """),
    "opinion": _lines("""
        homework should be banned
        social media does more harm than good
        everyone should learn to code
        zoos should be closed
        a four day work week is a good idea
        school uniforms are useful
        artificial intelligence will take our jobs
        cities should ban cars
        voting should be mandatory
        college is worth the cost
        video games are good for children
        we should colonize Mars
        money can buy happiness
        books are better than movies
        public transport should be free
        people should eat less meat
    """),
    "name": _lines("""
        Anna
        Tom
        Priya
        Carlos
        Mia
        Ahmed
        Lena
        James
        Yuki
        Olivia
        Kofi
        Sarah
        Ben
        Fatima
        Leo
        Grace
    """),
    "object": _lines("""
        apples
        pencils
        stickers
        cookies
        books
        marbles
        tickets
        oranges
        cupcakes
        eggs
        balloons
        postcards
        tulips
        muffins
    """),
}

TEMPLATES: tuple[str, ...] = _lines("""
    Explain {concept} in simple terms.
    What is {concept}?
    Can you explain {concept} to a five year old?
    How does {concept} work? Keep it short.
    Write a short paragraph about {concept}.
    I have a test tomorrow. Help me understand {concept}.
    Give me three key facts about {concept}.
    What are some common misconceptions about {concept}?
    Explain {concept} using an analogy from everyday life.
    Create a five question quiz on {concept} with answers.
    why is {concept} important
    Write a tweet about {concept}
    Make a short outline for an essay on {concept}.
    In one sentence, what does {concept} mean?
    Who first studied {concept}, and when?
    tell me about {event}
    What caused {event}?
    What were the main consequences of {event}?
    Write a diary entry of someone who lived through {event}.
    Summarize {event} in five bullet points.
    When did {event} happen and why does it matter today?
    Who were the most important people in {event}?
    What should I see in {place} in three days?
    Is {place} a good destination for families with small children?
    What is the best time of year to visit {place}?
    Write a travel blog post about {place}.
    What food is typical of {place}?
    tell me something surprising about {place}
    I'm going to {place} next month, what should I pack?
    Describe {place} as if you were walking through it at night.
    How do I make {food}?
    Give me a simple recipe for {food}.
    What can I use instead of eggs or milk in {food}?
    What goes well with {food}?
    My {food} never turns out right. What am I doing wrong?
    How many calories are in {food}, roughly?
    How do I {skill}?
    how to {skill}??
    Give me a step-by-step guide to {skill}.
    What are five tips to {skill}?
    I want to {skill} but I don't know where to start.
    What mistakes do beginners make when they try to {skill}?
    How long does it take to {skill}?
    What tools or supplies do I need to {skill}?
    What is the difference between {pair}?
    Compare {pair} in a table.
    {pair}: which would you recommend and why?
    List the pros and cons of {pair}.
    What do {pair} have in common?
    Write a dialogue in which two friends argue about {pair}.
    Tell me five fun facts about {animal}.
    Where do {animal} live and what do they eat?
    How do {animal} communicate with each other?
    are {animal} endangered?
    Write a children's story about {animal}.
    Write a riddle whose answer is {animal}.
    Write a short story about {hero}.
    Write the opening line of a novel about {hero}.
    Give me three plot ideas about {hero}.
    Write a bedtime story about {hero}. Make it funny.
    Continue this story: One morning, {hero} heard a knock at the door.
    Describe {hero} in vivid detail.
    Write a poem about {mood}.
    Write a haiku about {mood}.
    Compose four rhyming lines about {mood}.
    Write song lyrics about {mood} with a chorus.
    Give me three metaphors for {mood}.
    Write an email to {mail}.
    Draft a short, polite message to {mail}.
    I need to write to {mail}. What should I say?
    Write a formal letter to {mail}.
    Suggest three subject lines for an email to {mail}.
    Write a Python function that {pycode}.
    python code that {pycode} please
    How would I write a program in JavaScript that {pycode}?
    Write a unit test for a Python function that {pycode}.
    Explain step by step how to write a function that {pycode}.
    What is the time complexity of code that {pycode}?
    Write a SQL query to find {query}.
    how do i select {query} in sql
    Write a SQL query that returns {query}, and explain it.
    Design a small database schema that lets me look up {query}.
    Correct the grammar: {broken}
    Fix the mistakes in this sentence and explain them: "{broken}"
    Is this sentence correct? {broken}
    Please proofread: {broken}
    Rewrite this so it sounds professional: {broken}
    Summarize the following text in one sentence.\\n\\n{paragraph}
    {paragraph}\\n\\nWhat is the main point of this text?
    Give a title to this text: {paragraph}
    TL;DR\\n\\n{paragraph}
    Write three questions that can be answered with this paragraph:\\n{paragraph}
    Rewrite this for a 10 year old: {paragraph}
    Extract the key facts as bullet points:\\n\\n{paragraph}
    Translate to {language}: {sentence}
    How do you say "{sentence}" in {language}?
    What does the word "{word}" mean?
    Use the word "{word}" in three different sentences.
    Give me synonyms and antonyms for {word}.
    Define {word} and give an example.
    Where does the word {word} come from?
    Write a slogan for {product}.
    Write a product description for {product}.
    Come up with ten names for {product}.
    How would you advertise {product} on a small budget?
    Write a short business plan for {product}.
    Who is the target audience of {product}?
    Write a funny commercial for {product}.
    {issue}. What can I do?
    Help, {issue}! Any advice?
    What might be the reason that {issue}?
    My friend told me: "{issue}". How should I respond?
    Act as {role} and introduce yourself.
    Pretend you are {role}. Tell me about your day.
    You are {role}. Explain {concept} to me.
    Speak like {role} and give me advice: {issue}.
    Write a conversation between {role} and a lost tourist.
    What does a {job} do all day?
    What skills do I need to become a {job}?
    Write a job advertisement for a {job}.
    Give me five interview questions for a {job}, with good answers.
    Write a short cover letter for a position as a {job}.
    what's the average salary of a {job}
    What is the {fact}?
    {fact}?
    Do you know the {fact}
    True or false: I once read something strange about the {fact}. What is correct?
    Why {why}?
    My kid asked me why {why}. How do I explain it?
    Explain in two sentences why {why}.
    Help me plan {plan}.
    Make a checklist for {plan}.
    I have a budget of ${b}. How do I organize {plan}?
    What could go wrong with {plan}, and how do I avoid it?
    Is this review positive, negative or neutral? "{review}"
    Classify the sentiment: {review}
    Write a reply from the company to this review: {review}
    Rewrite this more politely: {stiff}
    Make this sentence shorter: {stiff}
    Rephrase in a friendly tone: "{stiff}"
    Give me three alternative versions of: {stiff}
    List ten {list_of}.
    Give me some {list_of}
    What are some {list_of}?
    Brainstorm {list_of}.
    Can you name five {list_of} and describe each in one line?
    Do you think {opinion}?
    Write a short essay arguing that {opinion}.
    Give arguments for and against: {opinion}.
    I believe that {opinion}. Convince me of the opposite.
    {name} has {b} {object} and gives {a} of them to a friend. How many are left?
    {name} buys {a} boxes with {c} {object} each. How many {object} is that in total?
    If {a} {object} cost ${b}, how much do {c} {object} cost?
    {name} reads {c} pages a day. How long does a book of {b} pages take?
    What is {b} plus {d}? Show your steps.
    what is {a} times {d}
    What is {a}% of {d}?
    A train travels {b} miles in {a} hours. What is its average speed?
    {name} shares {b} {object} equally among {a} children. How many does each child get, and how many remain?
    A rectangle is {a} cm wide and {c} cm long. Find its area and perimeter.
    {name} is {a} years older than {c}. How old will {name} be in ten years?
    A shirt costs ${b} and is on sale for {a}% off. What is the new price?
    Solve for x: {a}x + {c} = {b}
""")

PLAIN: tuple[str, ...] = _lines("""
    Hi
    hello!
    Hey, how are you today?
    Good morning
    What can you do?
    Who are you?
    who made you
    Tell me a joke.
    Tell me another joke about computers
    I'm bored.
    I had a really bad day
    I just got a new job!!
    What's your favorite color?
    Do you have feelings?
    can you help me with my homework
    Thanks, that was helpful!
    Sing me a song
    What should I have for dinner tonight?
    Do you like music?
    What day is it today?
    Good night!
    Are you smarter than a human?
    I feel sad and I don't know why.
    Recommend me a good book.
    What is the meaning of life?
    how old are you
    What languages do you speak?
    Surprise me with something interesting.
    Can you keep a secret?
    I'm learning English. Can we practice?
    My dog died yesterday.
    Give me a compliment
    Flip a coin for me.
    Pick a number between 1 and 10.
    What's up?
    ok
    I don't understand.
    Let's play a game.
    Write something beautiful.
    Give me a random fact.
    I can't decide between two job offers. How do I choose?
    Is it better to be feared or loved?
    How do I know if an email is a scam?
    Write a limerick about a programmer.
    What would happen if the moon disappeared?
    Tell me a tongue twister.
    What's a good way to apologize?
    How many hours are in a week?
    Convert 5 kilometers to miles.
    What is 15% of 80?
    Name the planets in order from the sun.
    List the months with 30 days.
    Which is heavier, a kilogram of feathers or a kilogram of steel?
    Write the alphabet backwards.
    Spell "necessary".
    Sort these words alphabetically: pear, apple, kiwi, banana, cherry
    Count to ten in Spanish.
    Turn this into a list: milk, eggs, bread and two bottles of water
    What rhymes with orange?
    Fill in the blank: The early bird catches the ____.
    Complete the sentence: If I had a million dollars, I would
    What comes next: 2, 4, 8, 16?
    Make an acronym for the word TEAM.
    Give me a strong password idea.
    How do I center a div in CSS?
    What does git rebase do?
    Write a bash command that counts the lines of all .txt files
    Write an HTML page with a heading and a button.
    Explain this code: for i in range(10): print(i * i)
    What is wrong with this code? print("hello)
    What does `x = [n for n in range(20) if n % 2]` do in Python?
    Write a regular expression that matches a phone number.
    what's the difference between a list and a tuple
    Write a for loop in C that prints 1 to 100.
    How do I exit vim?
    Write a JSON object that describes a book.
    How do I undo my last commit?
    Can I eat eggs every day?
    How much water should I drink?
    what to do for a bee sting
    Should I see a doctor about a mild fever?
    How many calories should I eat a day?
    Is it safe to sleep with a fan on?
    How do I treat a small burn?
    Write a toast for my sister's wedding.
    Write a birthday message for my grandmother.
    Write an out-of-office reply.
    Write a short bio for my website. I am a photographer from Denver.
    Write a LinkedIn post about finishing a course.
    Help me write a speech for my graduation.
    Suggest a title for a blog post on minimalism.
    Write a two line excuse for being late.
    What is the best way to learn math as an adult?
    I have chicken, rice and broccoli. What can I cook?
    I have 20 minutes and some pasta. Dinner ideas?
    What should I watch if I liked The Matrix?
    Plan my Sunday.
    Which sport is best for kids?
    How do I stay calm in an argument?
    Explain the rules of soccer.
    How does a bill become a law in the US?
    What is a mortgage?
    Should I invest or pay off my debt first?
    How do I read a nutrition label?
    What are the primary colors?
    How do you calculate the area of a circle?
    What is the Pythagorean theorem? Give an example
    Balance this equation: H2 + O2 -> H2O
    What causes earthquakes?
    Who wrote Hamlet, and what is it about?
    Give me a brief history of the internet.
    What is the plot of Romeo and Juliet?
    Which countries border France?
    Explain the offside rule
    What's a black belt?
    Describe the taste of a lemon to someone who has never had one.
    Write a conversation between the sun and the moon.
    Imagine you are a raindrop. Describe your journey.
    Invent a new holiday and describe how people celebrate it.
    Invent an animal. What does it look like?
    Write a horror story in two sentences.
    Write a six word story.
    What would a world without money look like?
    If you could travel anywhere, where would you go?
""")

FOLLOW_UPS: tuple[str, ...] = _lines("""
    Can you give an example?
    Make it shorter.
    Thanks! Can you explain that in simpler words?
    Why?
    Tell me more.
    can you make that a list
    Rewrite it in a more formal tone.
    Now make it funny.
    Are you sure about that?
    What else should I know?
    Summarize that in one sentence.
    How would you explain this to a child?
    Give me three more.
    What are the disadvantages?
    Turn your answer into a poem.
    Translate your answer to Spanish.
    What do you mean by that?
    Which one would you choose?
    ok, and what should I do first?
    Add more detail to the first point.
    I don't agree. Can you argue the other side?
    Write it as an email.
    That's too long, just give me the main idea
    Could you use bullet points?
    And what about cost?
    How long would that take?
    Please check your answer and correct any mistakes.
    Can you say that again in different words?
    What is the most important part?
    Great, thank you!
    Give me a title for it.
    Where can I learn more about this?
    What are some alternatives?
    Put that in a table.
    Is there an easier way?
    Write a question that tests whether I understood this.
    What happened next?
    Use a more casual style, like texting a friend
    How does this affect everyday life?
    Compare this with something similar.
    Rewrite it from another point of view.
    Who disagrees with this and why?
    Explain the second part again, I didn't get it.
    Give me a real world story about this.
    Make it rhyme.
    hmm, that doesn't help me much
    Can you write the same thing for beginners?
    Continue.
    What's the evidence for that?
    End it with a question.
""")
