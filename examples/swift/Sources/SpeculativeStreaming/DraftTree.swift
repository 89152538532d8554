import Foundation

/// A draft tree, breadth first; node 0 is the newest token. The twin of `ssmlx/model/tree.py`.
struct DraftTree {
    private(set) var tokens: [Int32]
    /// The nodes from the root to each, itself included.
    private(set) var paths: [[Int]]

    // An edge's log probability is held in this range, so that a child scores below its parent
    // and the best nodes hold every ancestor of theirs.
    private static let edgeRange: ClosedRange<Float> = -20.0 ... -1e-3

    init(root: Int32) {
        (tokens, paths) = ([root], [[0]])
    }

    /// The likeliest nodes below `root` from each stream's candidates, [G * K].
    ///
    /// A beam: as a child scores below its parent, `size` - d nodes at most are d levels below the
    /// root. Of equal nodes the later ones are kept, as in MLX.
    ///
    /// - Parameter logprobs: of the candidates, [G * K]; or, where the shape is conditional,
    ///   [G * K * K] of each given each of the stream before, those of the first given the root.
    init(root: Int32, candidates: [Int32], logprobs: [Float], shape: Manifest.Tree) {
        self.init(root: root)
        let (count, range) = (shape.numCandidates, Self.edgeRange)
        let width = shape.size == 2 ? 1 : shape.width ?? count
        var (scores, chosen, level) = ([Float(0)], [0], 0..<1)
        for depth in 0..<min(candidates.count / count, shape.size - 1) {
            var children: [(score: Float, parent: Int, candidate: Int)] = []
            for parent in level {
                let row = shape.isConditional == true ? depth * count + chosen[parent] : depth
                let edges = Array(logprobs[(row * count)..<((row + 1) * count)])
                var own = Array(edges.indices)
                if width < count {
                    own = Array(own.sorted { (-edges[$0], $0) < (-edges[$1], $1) }.prefix(width))
                }
                for candidate in own {
                    let edge = min(max(edges[candidate], range.lowerBound), range.upperBound)
                    children.append((scores[parent] + edge, parent, candidate))
                }
            }
            let ranked = children.indices.sorted { (children[$0].score, $0) < (children[$1].score, $1) }
            for child in ranked.suffix(shape.size - 1 - depth) {
                let (score, parent, candidate) = children[child]
                paths.append(paths[parent] + [tokens.count])
                tokens.append(candidates[depth * count + candidate])
                scores.append(score)
                chosen.append(candidate)
            }
            level = level.upperBound..<tokens.count
        }
        let best = scores.indices.sorted { (scores[$0], $0) > (scores[$1], $1) }.prefix(shape.size)
        self = selecting(best.sorted())
    }

    func depth(of node: Int) -> Int {
        paths[node].count - 1
    }

    func parent(of node: Int) -> Int {
        paths[node].dropLast().last ?? 0
    }

    /// The tree of the nodes `keep`, ascending, which hold every ancestor of theirs.
    func selecting(_ keep: [Int]) -> DraftTree {
        var renumbered = [Int: Int]()
        for (index, node) in keep.enumerated() { renumbered[node] = index }
        var tree = self
        tree.tokens = keep.map { tokens[$0] }
        tree.paths = keep.map { paths[$0].map { renumbered[$0]! } }
        return tree
    }

    /// The nodes from the root along children that carry the model's own token.
    func acceptedPath(_ targets: [Int32]) -> [Int] {
        var path = [0]
        while let child = tokens.indices.dropFirst().first(where: {
            parent(of: $0) == path.last! && tokens[$0] == targets[path.last!]
        }) {
            path.append(child)
        }
        return path
    }
}
